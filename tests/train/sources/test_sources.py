"""Samples from every kind of data, the same ones whoever asks, and what is said of data that cannot be used."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from diffprune import doors
from diffprune.config import DataConfig
from diffprune.extras import MissingExtraError
from diffprune.train.feed import Broken, Feed, Sample
from diffprune.train.sources import open_feed
from diffprune.train.sources.rows import read_row
from diffprune.train.sources.stream import StreamFeed
from diffprune.train.sources.table import choose_rows
from tests import tiny
from tests.train import runs

COUNT = 24


def png(index: int) -> bytes:
    out = io.BytesIO()
    tiny.picture(index, (40, 30)).save(out, "PNG")
    return out.getvalue()


def save_tars(folder: Path) -> Path:
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(shard * COUNT // 2, (shard + 1) * COUNT // 2):
                text = json.dumps({"caption": runs.caption(index)}) if index % 2 else runs.caption(index)
                ending = "json" if index % 2 else "txt"
                for name, content in ((f"a/{index:04d}.png", png(index)), (f"a/{index:04d}.{ending}", text.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def save_conversations(folder: Path) -> Path:
    runs.save_pictures(folder / "pictures", COUNT)
    entries: list[dict[str, Any]] = [{"id": "text", "conversations": []}]  # no picture: nothing to prune
    for index in range(COUNT):
        turns = [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": runs.caption(index)},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": " yes "},
            {"from": "human", "value": "Why?"},
        ]
        entries.append({"id": index, "image": f"{index}.png", "conversations": turns})
    (folder / "talk.json").write_text(json.dumps(entries))
    return folder / "talk.json"


def save_parquet(folder: Path) -> Path:
    folder.mkdir()
    for part in range(2):
        numbers = range(part * COUNT // 2, (part + 1) * COUNT // 2)
        pictures = [{"bytes": png(index), "path": None} for index in numbers]
        table = pyarrow.table({"image": pictures, "caption": [runs.caption(index) for index in numbers]})
        parquet.write_table(table, folder / f"{part}.parquet", row_group_size=4)
    return folder


def open_kind(kind: str, folder: Path, seed: int = 42, **options: Any) -> Feed:
    if kind == "jsonl":
        path = runs.save_pictures(folder / kind, COUNT)
    elif kind == "conversations":
        path = save_conversations(folder / kind)
        options.setdefault("images", str(path.parent / "pictures"))
    else:
        path = (save_tars if kind == "tar" else save_parquet)(folder / kind)
    return open_feed(DataConfig(**{"name": str(path), "validation": 4, "buffer": 5, **options}), seed)


def read_all(feed: Feed, start: int, stop: int) -> list[Sample | Broken]:
    positions = range(start, stop)
    found = feed.read(positions, positions)
    return [found[position] for position in positions]


@pytest.mark.parametrize("kind", ["jsonl", "conversations", "tar", "parquet"])
def test_every_kind_gives_each_sample_once_an_epoch_and_none_that_is_held_out(kind: str, tmp_path: Path) -> None:
    feed = open_kind(kind, tmp_path)
    assert feed.per_epoch == COUNT - 4
    held_out = [sample for sample in feed.validation() if isinstance(sample, Sample)]
    first, second = read_all(feed, 0, COUNT - 4), read_all(feed, COUNT - 4, 2 * (COUNT - 4))
    for samples in (first, second):
        assert all(isinstance(sample, Sample) for sample in samples)
        assert {sample.answer for sample in [*samples, *held_out]} == {runs.caption(index) for index in range(COUNT)}
    assert [sample.id for sample in first] != [sample.id for sample in second]  # another order
    sample = first[0]
    assert sample.question == ("What is it?" if kind == "conversations" else "Describe the picture.")
    assert sample.later == ((("Sure?", "yes"),) if kind == "conversations" else ())
    number = int(sample.answer.rpartition(" ")[2])
    assert sample.picture.tobytes() == tiny.picture(number, (40, 30)).tobytes()


def write_asked(kind: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Each row in a file of its own, each with the columns it has."""
    folder.mkdir()
    for part, row in enumerate(rows):
        if kind == "jsonl":
            (folder / "a.png").write_bytes(png(0))
            (folder / f"{part}.jsonl").write_text(json.dumps({"image": "a.png", **row}))
        elif kind == "tar":
            with tarfile.open(folder / f"{part}.tar", "w") as tar:
                for name, content in (("a.png", png(0)), ("a.json", json.dumps(row).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        else:
            columns = {"image": [png(0)], **{name: [value] for name, value in row.items()}}
            parquet.write_table(pyarrow.table(columns), folder / f"{part}.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "tar", "parquet"])
def test_a_question_of_a_row_wins_over_the_prompt_and_an_empty_or_missing_one_does_not(
    kind: str, tmp_path: Path
) -> None:
    rows = [{"caption": "one", "question": "How many?"}, {"question": "", "caption": "two"}, {"caption": "three"}]
    write_asked(kind, tmp_path / kind, rows)
    feed = open_feed(DataConfig(name=str(tmp_path / kind), validation=0, prompt="Tell."), 42)
    samples = [sample for sample in read_all(feed, 0, 3) if isinstance(sample, Sample)]
    asked = {sample.answer: sample.question for sample in samples}
    assert asked == {"one": "How many?", "two": "Tell.", "three": "Tell."}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_position_has_one_sample_whatever_was_read_before(kind: str, tmp_path: Path) -> None:
    feed = open_kind(kind, tmp_path)
    whole = [sample.id for sample in read_all(feed, 0, 30)]
    assert [sample.id for sample in read_all(feed, 8, 12)] == whole[8:12]  # back
    again = open_feed(feed.config if isinstance(feed, StreamFeed) else feed.table.config, 42)  # type: ignore[attr-defined]
    assert [sample.id for sample in read_all(again, 22, 30)] == whole[22:]  # and ahead
    other = open_feed(again.config if isinstance(again, StreamFeed) else again.table.config, 7)  # type: ignore[attr-defined]
    assert [sample.id for sample in read_all(other, 0, 30)] != whole


def test_the_share_is_exact_and_drawn_by_its_own_seed_alone() -> None:
    ten = choose_rows(1000, DataConfig(name="x", share=0.1))
    assert len(ten) == len(set(ten)) == 100 and ten == choose_rows(1000, DataConfig(name="x", share=0.1))
    assert set(choose_rows(1000, DataConfig(name="x", share=0.1, seed=1))) != set(ten)
    assert set(ten) < set(choose_rows(1000, DataConfig(name="x", share=0.2)))


def test_a_stream_is_sampled_like_a_table(tmp_path: Path) -> None:
    feed = open_kind("parquet", tmp_path, share=0.5)
    assert feed.per_epoch == 8
    samples = [*feed.validation(), *read_all(feed, 0, 8)]
    assert sorted(sample.id for sample in samples) == sorted(choose_rows(COUNT, DataConfig(name="x", share=0.5)))


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_parquet(tmp_path / "parquet")
    load = datasets.load_dataset

    def from_disk(name: str, *, split: str, streaming: bool) -> Any:
        assert (name, split, streaming) == ("somebody/pictures", "train", True)
        stream = load("parquet", data_files=sorted(map(str, folder.glob("*.parquet"))), split=split, streaming=True)
        return stream.cast_column("image", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    feed = open_feed(DataConfig(name="somebody/pictures", validation=4, buffer=5), 42)
    samples = [*feed.validation(), *read_all(feed, 0, COUNT - 4)]
    assert {sample.answer for sample in samples} == {runs.caption(index) for index in range(COUNT)}
    with pytest.raises(ValueError, match="needs to know how many rows somebody/pictures has"):
        open_feed(DataConfig(name="somebody/pictures", share=0.1), 42)
    with pytest.raises(ValueError, match="no column 'text' with captions; it has image, caption"):
        open_feed(DataConfig(name="somebody/pictures", caption="text"), 42)


def test_the_hub_is_not_asked_for_data_without_saying_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        assert "data.name='my/pictures' is no folder or file here: asking the hub for a dataset" in caplog.text
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'my/pictures' is neither .* that can be reached \(ConnectionError\)"):
        open_feed(DataConfig(name="my/pictures"), 42)


def test_a_version_of_datasets_that_runs_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(MissingExtraError, match=r"datasets 3\.6\.0 can run a dataset's own code, .*'datasets>=4'"):
        open_feed(DataConfig(name="somebody/pictures"), 42)


def test_a_source_of_another_package_is_found_by_its_name_before_any_folder(tmp_path: Path, monkeypatch) -> None:
    doors.join(doors.DATA, "endless", "tests.train.runs:Endless")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endless").mkdir()
    feed = open_feed(DataConfig(name="endless", validation=3), 7)
    assert isinstance(feed, runs.Endless) and (feed.seed, feed.per_epoch) == (7, None)
    assert len(feed.validation()) == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"image": "0.png"}', "the caption is None: column 'caption' must hold a text"),
        ('{"image": "0.png", "caption": "  "}', "the caption is '  '"),
        ('{"image": "gone.png", "caption": "a"}', "there is no image file"),
        ('{"image": "metadata.jsonl", "caption": "a"}', "no image that can be read"),
        ('{"caption": "a"}', "there is no picture: column 'image' holds None"),
        ("[1]", "metadata.jsonl line 3 is no JSON object"),
        ("{", "metadata.jsonl line 3 is not JSON"),
    ],
)
def test_a_broken_row_says_what_is_wrong_with_it(row: str, reason: str, tmp_path: Path) -> None:
    folder = runs.save_pictures(tmp_path / "data", 2)
    with (folder / "metadata.jsonl").open("a") as file:
        file.write(row + "\n")
    feed = open_feed(DataConfig(name=str(folder), validation=0), 42)
    (broken,) = [sample for sample in read_all(feed, 0, 3) if isinstance(sample, Broken)]
    assert broken.id == 2 and reason in broken.reason


@pytest.mark.parametrize("column", ["caption", "question"])
def test_half_a_surrogate_pair_is_a_broken_row_wherever_it_comes_from(column: str, tmp_path: Path) -> None:
    """Rows of the hub or of a package are no JSON that is checked when it is read."""
    row = {"image": tiny.picture(1), "caption": "a ring", column: "half \ud800"}
    broken = read_row(3, row, DataConfig(name="x"), tmp_path)
    assert broken == Broken(3, f"the {column} holds half a surrogate pair at 5, which is no character")


@pytest.mark.parametrize("kind", ["path", "bytes", "picture"])
def test_pictures_of_training_data_are_turned_as_their_exif_orientation_says(kind: str, tmp_path: Path) -> None:
    stored = tiny.picture(1, (30, 20))
    exif = stored.getexif()
    exif[0x0112] = 6  # as a phone held upright stores it
    stored.save(tmp_path / "a.jpg", exif=exif)
    content = (tmp_path / "a.jpg").read_bytes()
    with Image.open(tmp_path / "a.jpg") as opened:
        value = {"path": "a.jpg", "bytes": {"bytes": content, "path": None}, "picture": opened}[kind]
        row = read_row(0, {"image": value, "caption": "a ring"}, DataConfig(name="x"), tmp_path)
    assert isinstance(row, Sample) and row.picture.size == (20, 30)


def test_a_damaged_row_group_is_broken_rows_and_the_others_are_read(tmp_path: Path) -> None:
    folder = save_parquet(tmp_path / "parquet")
    path = folder / "0.parquet"
    group = parquet.ParquetFile(path).metadata.row_group(0)
    start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 16] = b"\xff" * 16  # the header of its first page
    path.write_bytes(content)
    rows = read_all(open_feed(DataConfig(name=str(folder), validation=0), 42), 0, COUNT)
    broken = [row for row in rows if isinstance(row, Broken)]
    assert sorted(row.id for row in broken) == list(range(group.num_rows)) and group.num_rows < COUNT
    assert all("row group 0 of 0.parquet is damaged" in row.reason for row in broken)


def test_damaged_pictures_and_talks_are_broken_rows(tmp_path: Path) -> None:
    shards = save_tars(tmp_path / "tar")
    content = (shards / "0.tar").read_bytes()
    (shards / "0.tar").write_bytes(content.replace(b"\x89PNG", b"\x89PXX", 1))
    rows = read_all(open_feed(DataConfig(name=str(shards), validation=0), 42), 0, COUNT)
    assert [row.id for row in rows if isinstance(row, Broken)] == [0]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("human", "?")], "no question and answer"),
        ([("gpt", "a"), ("human", "?")], "no question and answer, or not in turns"),
        ([("human", "?"), ("gpt", "a"), ("gpt", "b"), ("human", "?")], "not in turns"),
        ([("human", "?"), ("gpt", " ")], "an answer is empty"),
        ([("human", "?"), ("gpt", "a"), ("human", "<image>"), ("gpt", "b")], "a question after the first is empty"),
        ([("human", 5), ("gpt", "a")], "no question and answer"),
        ([], "no question and answer"),
    ],
)
def test_a_conversation_out_of_turn_is_a_broken_row(turns: list[Any], reason: str, tmp_path: Path) -> None:
    tiny.picture(0).save(tmp_path / "a.png")
    talk = tmp_path / "talk.json"
    said = [{"from": who, "value": text} for who, text in turns]
    talk.write_text(json.dumps([{"image": "a.png", "conversations": said}]))
    (row,) = read_all(open_feed(DataConfig(name=str(talk), validation=0), 42), 0, 1)
    assert isinstance(row, Broken) and reason in row.reason


def test_data_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = runs.save_pictures(tmp_path / "data", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.tar").write_bytes(b"no tar" * 200)
    (tmp_path / "list.json").write_text("{}")
    (tmp_path / "other.csv").write_text("")
    for options, message in (
        ({"name": str(folder), "caption": "text"}, "no column 'text' with captions; it has image, caption"),
        ({"name": str(folder), "image": "file"}, "no column 'file' with pictures"),
        ({"name": str(folder), "validation": 2}, "nothing is left to train on"),
        ({"name": str(tmp_path / "empty")}, "has no captions: it holds no .jsonl, .parquet or .tar"),
        ({"name": str(tmp_path / "bad")}, "damaged or compressed"),
        ({"name": str(tmp_path / "list.json")}, "holds no list"),
        ({"name": str(tmp_path / "other.csv")}, "is of no known kind"),
        ({"name": str(tmp_path / "gone")}, "is not there"),
    ):
        with pytest.raises(ValueError) as error:
            open_feed(DataConfig(**options), 42)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_shard_cut_between_two_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as shard:
        for name in ("a", "b"):
            for ending, content in (("png", png(0)), ("txt", b"a picture")):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    with tarfile.open(path) as shard:
        cut = shard.getmember("b.png").offset
    assert len(open_feed(DataConfig(name=str(path), validation=0), seed=0).read(range(2), range(2))) == 2
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="is cut short after 1 samples; copy it again"):
        open_feed(DataConfig(name=str(path), validation=0), seed=0)
