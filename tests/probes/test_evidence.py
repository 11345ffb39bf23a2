"""The page of evidence is what the results files say."""

from pathlib import Path

import pytest

from diffprune.probes import alignment, coherence, evidence, landscape, relevance
from diffprune.probes.store import Store


def test_the_page_is_what_the_results_say(root: Path) -> None:
    text = (root / "docs/evidence.md").read_text()
    assert text == evidence.refresh(text, root / "results"), "run python -m diffprune.probes.evidence"
    for name in evidence.FINDINGS:
        assert f"<!-- probe: {name} -->" in text
        has_results = (root / f"results/{name}.json").exists()
        assert (f"there is no `results/{name}.json`" in text) != has_results


@pytest.mark.parametrize("probe", [coherence, landscape, alignment, relevance], ids=lambda probe: probe.NAME)
def test_every_probe_has_words_for_what_it_found(probe, measured, tmp_path: Path) -> None:
    path = tmp_path / f"{probe.NAME}.json"
    Store(path=path, notes="a trial", summarise=probe.summarise, key_names=probe.KEY).add(measured(probe))
    said = evidence.block(probe.NAME, tmp_path)
    assert "DeiT-Tiny" in said and "A trial." in said and f"img/{probe.NAME}.png" in said and "nan" not in said


def test_a_block_of_no_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names the probe 'magic'"):
        evidence.refresh("<!-- probe: magic -->\n<!-- end of probe -->", tmp_path)
