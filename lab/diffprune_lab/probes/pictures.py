"""The pictures of a run: what is trained on and what is measured on, each read when it is first asked for."""

from dataclasses import dataclass
from functools import cached_property

from diffprune_lab.probes.data import Photos, draw_photos, find_files, fingerprint, read_photos


@dataclass(kw_only=True)
class Pictures:
    """Pictures of one size on one device.

    Args:
        data: Parquet file or folder; None draws pictures, which only a trial may.
        train_data: Pictures to train on where `data` has none.
        side: Pixels of a side.
        is_trial: Whether pictures may be drawn.
    """

    data: str | None
    train_data: str | None
    side: int
    device: str
    is_trial: bool

    @cached_property
    def train(self) -> Photos:
        source = self.train_data or self.data
        if source is None:
            return self._draw(256, seed=0)
        files, _ = find_files(source)
        if not files:
            raise ValueError(
                f"{source} has no file whose name starts with train, so there is nothing to train on; "
                "name the folder that has with --train-data"
            )
        return read_photos(files, side=self.side, device=self.device)

    @cached_property
    def held_out(self) -> Photos:
        """Pictures nothing was trained on."""
        if self.data is None:
            return self._draw(64, seed=1)
        train, files = find_files(self.data)
        if self.train_data is not None:  # then everything here is to be measured on, whatever its name
            files = sorted([*train, *files])
        if not files:
            raise ValueError(f"every file of {self.data} is called train...; pictures to measure on need another name")
        return read_photos(files, side=self.side, device=self.device)

    @cached_property
    def trained_on(self) -> str | None:
        """Fingerprint of the pictures to train on; None where there are none."""
        source = self.train_data or self.data
        if source is None:
            return "drawn"
        files, _ = find_files(source)
        return fingerprint(files) if files else None

    def _draw(self, count: int, seed: int) -> Photos:
        if not self.is_trial:
            raise ValueError(
                "there are no pictures; give a folder of parquet files with --data, or try with --size tiny"
            )
        return draw_photos(count, side=self.side, seed=seed, device=self.device)
