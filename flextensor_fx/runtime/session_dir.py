"""Temporary directories for stores, removed when done and, after a crash, by the next process that makes one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flextensor_fx.errors import StoreError

_PREFIX = "flextensor_fx-"
_LOCK = "lock"
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = "/proc/self/mountinfo"


def choose_base(store_dir: str | os.PathLike[str] | None) -> Path:
    """The directory under which stores are made.

    Args:
        store_dir: the user's choice, taken as it is; None for the first of the usual temporary places that is on a disk.

    Raises:
        StoreError: the directory cannot be written to, or every usual place is in memory.
    """
    if store_dir is not None:
        base = Path(store_dir)
        if not _writable(base):
            found = "it cannot be written to" if base.is_dir() else "no such directory"
            raise StoreError(
                f"store_dir={str(store_dir)!r}: expected a writable directory, found {found}; make it first"
            )
        return base.resolve()
    places = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home() / ".cache"]
    writable = [place.resolve() for place in places if _writable(place)]
    for place in writable:
        if filesystem_type(place) not in _IN_MEMORY:
            return place
    raise StoreError(
        f"no place for a store: expected a writable directory on a disk, found {', '.join(map(str, writable)) or 'none'} "
        "in memory only; set store_dir"
    )


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: where it is, its type ("ext4") and what is mounted ("/dev/nvme0n1p2")."""

    point: str
    kind: str
    source: str


def filesystem_type(path: Path) -> str | None:
    """Type of the file system that holds `path` ("ext4"), or None where it cannot be told."""
    mount = mount_of(path)
    return None if mount is None else mount.kind


def mount_of(path: Path) -> Mount | None:
    """The mount that holds `path`, or None where it cannot be told."""
    try:
        lines = Path(_MOUNTS).read_text().splitlines()
    except OSError:
        return None
    found, depth = None, -1
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, (kind, source, *_) = left.split(), [*right.split(), "", ""]
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        # The last mount on a place hides the earlier ones, hence >=.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = Mount(str(point), kind, source), len(point.parts)
    return found


class SessionDir:
    """A private directory that goes away with `close`, with this object, at exit, or after a crash.

    A lock file inside is held by flock for the life of the process, so that a directory whose lock can be had is an
    orphan. A forked child inherits the lock and never removes the directory.

    Attributes:
        path: the directory.
    """

    def __init__(self, store_dir: str | os.PathLike[str] | None = None) -> None:
        base = choose_base(store_dir)
        _sweep(base)
        self.path, fd = _create(base)
        self._finalizer = weakref.finalize(self, _remove, self.path, fd, os.getpid())

    def close(self) -> None:
        """Remove the directory and all in it. Calling it again does nothing."""
        self._finalizer()


def _writable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _create(base: Path) -> tuple[Path, int]:
    for _ in range(100):
        path = base / f"{_PREFIX}{secrets.token_hex(6)}"
        fd = -1
        try:
            path.mkdir(mode=0o700)
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _try_lock(fd)
            # A sweeper may have had the lock between our open and our flock, and have removed the file: then start over.
            if os.stat(path / _LOCK).st_ino == os.fstat(fd).st_ino:
                os.write(fd, f"{os.getpid()}\n".encode())
                return path, fd
        except (FileNotFoundError, FileExistsError, BlockingIOError):
            pass
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f"no store can be made in {base}: {error}; set store_dir to another directory") from error
        if fd >= 0:
            os.close(fd)
    raise StoreError(f"no store can be made in {base}: the new directory vanished 100 times; set store_dir")


def _try_lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Where flock is not to be had, a sweeper cannot have it either and leaves the directory alone.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def _sweep(base: Path) -> None:
    for path in _orphan_candidates(base):
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            # Its maker died, or is alive, between mkdir and the lock: rmdir takes only an empty one and the maker retries.
            _quietly_rmdir(path)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(path)
        except OSError:
            pass
        finally:
            os.close(fd)


def _orphan_candidates(base: Path) -> Iterable[Path]:
    try:
        entries = list(os.scandir(base))
    except OSError:
        return
    for entry in entries:
        if not entry.name.startswith(_PREFIX):
            continue
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        # In a shared /tmp the name may be somebody else's, or a link to something dear.
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
            yield Path(entry.path)


def _empty(path: Path) -> None:
    # The lock goes last: a directory without one that is not empty would never be recognised as an orphan.
    for entry in list(os.scandir(path)):
        if entry.name == _LOCK:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    os.unlink(path / _LOCK)
    _quietly_rmdir(path)


def _quietly_rmdir(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _remove(path: Path, fd: int, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
