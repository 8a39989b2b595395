"""TensorBoard's files, written where an error of the disk is seen, not in a thread of their own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

_FORMAT = "brain.Event:2"


class Board:
    """Numbers over updates, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, resumed: int | None) -> None:
        """`resumed` is the first update that is shown again: what older files hold of it and later ones is hidden."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_FORMAT))
        if resumed is not None:
            self._write(Event(wall_time=time.time(), step=resumed, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Show values at an update."""
        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=shown)))
        self._file.flush()

    def close(self) -> None:
        """Write what is left."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
