"""Captures: what is put back after one, and which choices become graphs. The device is made up; a GPU is not needed."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from diffprune.fast import graphs, verify
from diffprune.fast.graphs import Stage, capturing, frozen_heap
from tests.fast.compiled import compiled


class MadeUpDevice:
    """A device whose captures leave the process on their own stream where they fail, as torch's do."""

    def __init__(self) -> None:
        self.stream, self.pools = "main", []
        self.fails_at_the_end = False

    @contextmanager
    def capture(self, graph: object, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert not gc.isenabled() and capture_error_mode == "thread_local"  # other threads may use the device meanwhile
        self.pools.append(pool)
        self.stream = "capture"
        yield
        if self.fails_at_the_end:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.stream = "main"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    device = MadeUpDevice()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", device.capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(device, "stream", stream))
    return device


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The collector on or off, as a test finds it."""
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_the_collector_rests_during_a_capture_and_is_then_as_before(device: MadeUpDevice, collects: bool) -> None:
    with capturing("pool") as graph:
        assert not gc.isenabled()
    assert gc.isenabled() == collects and graph is not None and device.pools == ["pool"]


def test_after_a_failed_capture_collector_and_stream_are_as_before(device: MadeUpDevice, collects: bool) -> None:
    device.fails_at_the_end = True
    with pytest.raises(RuntimeError, match="stream is capturing"), capturing():
        pass
    assert gc.isenabled() == collects and device.stream == "main"


def test_after_a_failure_inside_a_capture_collector_and_stream_are_as_before(
    device: MadeUpDevice, collects: bool
) -> None:
    with pytest.raises(KeyError), capturing():
        raise KeyError("inside")
    assert gc.isenabled() == collects and device.stream == "main"


def test_what_is_dead_is_collected_before_the_capture(device: MadeUpDevice) -> None:
    finalised = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalised.append(device.stream)

    gc.disable()
    try:
        Cycle()
        with capturing():
            pass
    finally:
        gc.enable()
    assert finalised == ["main"]


def test_in_a_frozen_heap_what_is_new_is_collected_and_all_of_it_afterwards() -> None:
    gc.unfreeze()  # what the session froze; another test collects a little more from here on

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    old = Cycle()
    watched_old = weakref.ref(old)
    with pytest.raises(KeyError), frozen_heap():
        assert gc.get_freeze_count() > 0
        new = Cycle()
        watched_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert watched_new() is None and watched_old() is not None
        raise KeyError("inside")
    gc.collect()
    assert watched_old() is None and gc.get_freeze_count() == 0


def test_a_heap_that_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_stage_that_is_not_captured_needs_no_device() -> None:
    calls: list[int] = []
    stage = Stage(lambda: calls.append(1), capture=False)
    stage.warm_up()
    stage()
    assert len(calls) == 2 and stage.graph is None


# --- choices ----------------------------------------------------------------------------------------------------------


def capturable(warn: Any = lambda sentence: None) -> bool:
    """Whether a choice of one of four tokens can be captured."""
    return verify.capturable(lambda x, into: None, torch.zeros(1, 4, 2), 1, warn=warn)


def test_a_choice_that_waits_for_the_device_is_not_even_tried(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refused() -> Iterator[None]:
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    monkeypatch.setattr(graphs, "waiting_refused", refused)
    assert not capturable() and device.pools == []


def test_a_choice_whose_capture_fails_is_said_with_its_reason(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "waits_for_device", lambda call: False)
    said: list[str] = []
    assert capturable(said.append) and said == []
    device.fails_at_the_end = True
    assert not capturable(said.append)
    assert len(said) == 1 and said[0].endswith("operation not permitted when stream is capturing")
    assert device.stream == "main"


def test_an_error_that_speaks_of_no_waiting_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def allowed() -> Iterator[None]:
        yield

    def broken() -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(graphs, "waiting_refused", allowed)
    assert not graphs.waits_for_device(lambda: None)
    with pytest.raises(RuntimeError, match="shapes differ"):
        graphs.waits_for_device(broken)


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_is_refused_inside_and_allowed_behind_whatever_happens(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str | int] = []

    def set_mode(mode: str | int) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)  # the caller's own: to warn
    with pytest.raises(RuntimeError) if fails else nullcontext(), graphs.waiting_refused():
        assert modes == ["error"]
        with ThreadPoolExecutor(1) as pool:  # another thread waits for its turn with the one setting
            assert not pool.submit(graphs.SYNC_MODE.acquire, blocking=False).result()
        if fails:
            raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", 1]


def test_another_gpu_than_the_first_is_the_current_one_while_parts_are_made_and_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Any] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    vlm = compiled("llava", "feature_norm", batch_sizes=(1,))
    monkeypatch.setattr(torch.cuda, "device", current)
    second = torch.device("cuda", 1)
    monkeypatch.setattr(vlm.fast, "device", second)
    monkeypatch.setattr(vlm.fast.growth.parts, "device", second)
    with vlm.fast.turn():
        assert entered == [second]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast says that there is no GPU
        with vlm.fast.growth.parts.making():
            assert entered == [second, second]
