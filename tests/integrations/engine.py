"""One engine in a process of its own: starts it, sends it rounds of requests, writes down what came back.

    python -m tests.integrations.engine asked.json answered.json

`asked.json` holds `arguments` (of `vllm.LLM`) and `rounds`, lists of requests that are sent together, each with
`prompt`, `images` (paths), `keep` and `max_tokens`; with `chat` its `text` is asked through the model's template
instead (one budget a round). Of each request come back its new `ids`, the length of its
`prompt`, and how much of that was `cached`; or its `error`. An engine that does not start gives `refused`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def answers(folder: Path, arguments: dict[str, Any], rounds: list[list[dict[str, Any]]]) -> Any:
    """What an engine with these arguments gives to rounds of requests."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(json.dumps({"arguments": SETTINGS | arguments, "rounds": rounds}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.engine", str(folder / "asked.json"), str(folder / "answered.json")],
        env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "answered.json").exists(), done.stderr[-3000:]
    return json.loads((folder / "answered.json").read_text())


def main(asked: Path, answered: Path) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams

    given = json.loads(asked.read_text())
    try:
        llm = LLM(**given["arguments"])
    except Exception as error:
        answered.write_text(json.dumps({"refused": f"{error} {error.__cause__ or ''}"}))
        return
    out = []
    for asked_now in given["rounds"]:
        requests, talks, sampling = [], [], []
        for one in asked_now:
            request: dict[str, Any] = {"prompt": one["prompt"]}
            if one["images"]:
                request["multi_modal_data"] = {"image": [Image.open(path).convert("RGB") for path in one["images"]]}
            if one.get("keep") is not None:
                request["mm_processor_kwargs"] = {"keep": one["keep"]}
            requests.append(request)
            pictures = [
                {"type": "image_pil", "image_pil": picture}
                for picture in request.get("multi_modal_data", {}).get("image", [])
            ]
            talks.append([{"role": "user", "content": [*pictures, {"type": "text", "text": one["text"]}]}])
            sampling.append(SamplingParams(temperature=0, max_tokens=one["max_tokens"], ignore_eos=one["ignore_eos"]))
        try:
            if asked_now[0].get("chat"):
                keep = requests[0].get("mm_processor_kwargs")
                got = llm.chat(talks, sampling, use_tqdm=False, mm_processor_kwargs=keep)
            else:
                got = llm.generate(requests, sampling, use_tqdm=False)
            out.append(
                [
                    {
                        "ids": list(one.outputs[0].token_ids),
                        "prompt": len(one.prompt_token_ids),
                        "cached": one.num_cached_tokens,
                    }
                    for one in got
                ]
            )
        except ValueError as error:  # of a request; after any other the engine is dead
            out.append([{"error": str(error)}])
    answered.write_text(json.dumps({"rounds": out}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
