import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

import diffprune
from diffprune import extras
from diffprune.cli import main as cli
from diffprune.cli.doctor import _broken_torchvision, _find_problems
from diffprune.registry import BACKBONES, METHODS
from diffprune.results import write_results


@pytest.fixture
def run(capsys):
    """Runs a command line; gives its exit code, stdout and stderr."""

    def run_arguments(*arguments: str) -> tuple[int, str, str]:
        code = cli._run(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_arguments


def test_every_file_is_a_subcommand_with_help_and_examples(run, root):
    names = {path.stem for path in (root / "src/diffprune/cli").glob("*.py")} - {"main", "__init__"}
    assert names <= set(cli.subcommands())
    for name in cli.subcommands():
        code, out, _ = run(name, "--help")
        assert code == 0 and "Examples:" in out and f"diffprune {name}" in out


def test_no_arguments_show_the_help(run):
    code, out, err = run()
    assert code == 0 and "doctor" in out and err == ""


def test_the_help_needs_neither_transformers_nor_matplotlib():
    code = (
        "import runpy, sys; sys.argv = ['diffprune', '--help']\n"
        "try: runpy.run_module('diffprune', run_name='__main__')\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = {'transformers', 'matplotlib', 'huggingface_hub'} & set(sys.modules); assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "doctor" in run.stdout, run.stderr


@pytest.mark.parametrize("flag", ["-OO", "-O"])
def test_python_without_docstrings_is_refused_with_the_way_out(flag):
    run = subprocess.run([sys.executable, flag, "-m", "diffprune", "methods", "--json"], capture_output=True, text=True)
    if flag == "-O":
        assert run.returncode == 0 and json.loads(run.stdout)
    else:
        assert run.returncode == 2 and run.stdout == ""
        assert run.stderr.count("\n") == 1 and "PYTHONOPTIMIZE=2" in run.stderr and "leave that out" in run.stderr


@pytest.mark.parametrize(("json_too", "expected"), [("", "Gr??e ?"), ("_json", r'"Gr\u00f6\u00dfe \ud83d\ude00"')])
def test_a_sign_that_the_output_s_encoding_lacks_ends_no_command(json_too, expected):
    code = (
        "from diffprune import cli; from diffprune.cli import main\n"
        f"main._run = lambda _: {'cli.print_json' if json_too else 'print'}('Gr\u00f6\u00dfe \U0001f600')\n"
        "main.main()"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stdout.strip()) == (0, expected), run.stderr


def test_the_version_is_the_packages(run):
    assert run("--version") == (0, f"diffprune {diffprune.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["docter"], "Did you mean 'doctor'"),
        (["doctor", "--jsn"], "--jsn"),
        (["report", "--results", "no_such_folder"], "no_such_folder is no folder"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_a_non_zero_code(run, arguments, words):
    code, out, err = run(*arguments)
    assert code != 0 and out == ""
    assert words in err and err.startswith("diffprune: ") and err.count("\n") == 1


def test_an_unexpected_error_says_how_to_see_more(run, monkeypatch):
    def fail() -> None:
        raise KeyError("surprise\nwith two lines")

    monkeypatch.setattr("diffprune.cli.doctor.inspect_installation", fail)
    code, _, err = run("doctor")
    assert code == 1 and "unexpected KeyError" in err and "--debug" in err and err.count("\n") == 1
    with pytest.raises(KeyError, match="surprise"):
        run("doctor", "--debug")


def test_stopping_it_is_no_success(run, monkeypatch):
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffprune.cli.doctor.inspect_installation", stop)
    assert run("doctor")[0] == 130


def test_doctor_says_what_is_there_and_what_is_missing(run, monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "app", extras.Extra(("no_such_module",), "the page"))
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert {"python", "torch", "transformers", "diffprune"} <= set(found["versions"])
    assert found["extras"]["app"] == {"present": False, "missing": ["no_such_module"], "gives": "the page"}
    _, out, _ = run("doctor")
    assert "missing" in out and "pip install no-such-module" in out and "device:" in out
    assert found["optional"]["peft"] == {"present": bool(find_spec("peft")), "gives": "bases with a LoRA"}


def test_doctor_lists_no_extra_that_nothing_uses(root):
    """Each is asked for by name where it is used, and stands in pyproject.toml."""
    written = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = [path for path in (root / "src/diffprune").rglob("*.py") if path.name != "extras.py"]
    text = "\n".join(path.read_text() for path in code)
    for name, extra in extras.EXTRAS.items():
        assert f"of the extra '{name}'" in text or f'require("{name}")' in text, name
        assert len(written[name]) == len(extra.modules)


def test_doctor_names_a_torchvision_of_another_build(run, monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("diffprune.cli.doctor.is_installed", lambda name: True)
    monkeypatch.setattr("diffprune.cli.doctor.importlib.import_module", fail)
    assert _broken_torchvision() == [
        "torchvision cannot be imported (operator torchvision::nms does not exist): install the one that fits torch, "
        "or pip uninstall it"
    ]


def test_doctor_fails_where_a_library_is_too_old(run, monkeypatch):
    assert _find_problems({"torch": "2.7.1", "transformers": "5.17.0"}) == [
        "torch 2.7.1 is too old: run pip install 'torch>=2.8'"
    ]
    monkeypatch.setattr("diffprune.cli.doctor._find_problems", lambda versions: ["torch is too old"])
    code, out, _ = run("doctor", "--json")
    assert code == 1 and json.loads(out)["problems"] == ["torch is too old"]


def test_a_missing_extra_is_one_sentence_that_names_it(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "serve", extras.Extra(("no_such_module",), "a server"))
    with pytest.raises(
        extras.MissingExtraError, match="no_such_module of the extra 'serve' is not installed: run pip install no-such"
    ):
        extras.require("serve")


def test_methods_lists_every_method(run):
    code, out, _ = run("methods", "--json")
    found = json.loads(out)
    assert code == 0 and [method["name"] for method in found] == METHODS.names()
    keys = {"name", "place", "needs", "trained", "budget", "paper", "year", "licence", "certainty", "idea"}
    assert all(set(method) == keys for method in found)
    code, out, _ = run("methods", "--wide")
    assert code == 0 and all(column in out for column in keys - {"idea"})
    assert out.count("visionzip") == 2 and "exact K, dominant + contextual" in out  # one table how, one whence
    assert all(cell in out for cell in ("CC BY-NC 4.0", "2024", "release read", "Token Merging: Your ViT But Faster"))


def test_backbones_lists_every_family_and_preset(run):
    code, out, _ = run("backbones", "--json")
    found = {family["family"]: [preset["name"] for preset in family["presets"]] for family in json.loads(out)}
    assert code == 0 and sorted(found) == BACKBONES.names()
    assert "llava-1.5-7b" in found["llava"]
    code, out, _ = run("backbones")
    assert code == 0 and "llava-1.5-7b" in out


ROWS = [
    {"method": "full", "keep": 1.0, "seed": 0, "task": "colour", "score": 80.0},
    {"method": "random", "keep": 32, "seed": 0, "task": "colour", "score": 40.0},
    {"method": "random", "keep": 64, "seed": 0, "task": "colour", "score": 50.0},
    {"method": "random", "keep": 64, "seed": 1, "task": "colour", "score": 60.0},
    {"method": "random", "keep": 64, "seed": 0, "task": "shape", "score": 20.0},
    {"method": "random", "keep": 64, "retention": 70.0},
    {"path": "fast", "batch": 1, "ttft_ms": 12.5},
]


@pytest.fixture
def results_folder(tmp_path):
    write_results(tmp_path / "results/main.json", name="main", rows=ROWS, command="diffprune x", commit="a" * 40,
                  device="CPU", seeds=[0, 1], notes="Of drawn pictures.")  # fmt: skip
    return tmp_path / "results"


def test_report_writes_summaries_and_where_they_come_from(run, results_folder):
    page = results_folder.parent / "docs.md"
    code, out, _ = run("report", "--results", str(results_folder), "--out", str(page))
    assert code == 0 and "1 results files" in out
    text = page.read_text()
    assert "## main" in text and "Of drawn pictures." in text
    assert "| random | 70.0 |" in text and text.count("| random |") == 1  # no row of a task or a seed
    assert "(results/main.json): `diffprune x`" in text
    assert "fast, batch 1:" in text and "| - | 12.50 |" in text
    assert f"`diffprune x` on CPU, {read_date(results_folder)}, commit `aaaaaaaaaaaa`, seeds 0, 1." in text


def test_report_tells_what_layers_hold_where_tokens_leave_inside_the_model(run, tmp_path):
    rows = [{"method": "random", "keep": 64, "retention": 70.0}]
    rows += [{"method": "fastv", "keep": 64, "retention": 80.0, "average": 234.667}]
    write_results(tmp_path / "results/main.json", name="main", rows=rows, command="x", commit="a" * 40, device="CPU")
    code, _, _ = run("report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs.md"))
    text = (tmp_path / "docs.md").read_text()
    assert code == 0 and "| random | 70.0 |" in text
    assert text.index("in square brackets is the number of visual tokens") < text.index("| fastv | 80.0 [234.7] |")


def read_date(results_folder):
    return json.loads((results_folder / "main.json").read_text())["date"][:10]


def test_report_refreshes_the_blocks_of_a_readme_and_nothing_else(run, results_folder):
    readme, page = results_folder.parent / "README.md", results_folder.parent / "docs.md"
    readme.write_text("before\n<!-- results: main -->\nold\n<!-- end of results -->\nafter\n")
    for _ in range(2):  # a second run changes nothing
        assert run("report", "--results", str(results_folder), "--out", str(page), "--readme", str(readme))[0] == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- results: main -->\n") and text.endswith("<!-- end of results -->\nafter\n")
        assert "old" not in text and text.count("| random | 70.0 |") == 1


def test_report_refuses_a_block_without_its_file_and_writes_nothing(run, results_folder):
    readme, page = results_folder.parent / "README.md", results_folder.parent / "docs.md"
    readme.write_text("<!-- results: other -->\nold\n<!-- end of results -->\n")
    code, _, err = run("report", "--results", str(results_folder), "--out", str(page), "--readme", str(readme))
    assert code == 2 and "'other'" in err
    assert not page.exists() and "old" in readme.read_text()


def test_methods_are_listed_without_torch() -> None:
    program = (
        "import sys; from diffprune.cli.methods import list_methods; list_methods(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
