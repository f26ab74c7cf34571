"""What the machine must offer before work begins: folders and files to write, the folder of a run, an address.

Nothing heavy is imported, so the command line refuses at once what is missing or occupied.
"""

from __future__ import annotations

import socket
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile

from patchproof.types import CheckError, InputError, is_blank

BEGIN_AGAIN = "restore it from a copy, or begin a new run"
LEFTOVERS = {".lock", "manifest.json.part"}
"""Files that a run leaves in its folder if it is killed at once."""


def require_free(folder: Path | None, *, resume: bool) -> None:
    """Refuse a folder that cannot be created or holds other things, a run that another process writes, or, if `resume`
    is False, any run."""
    if folder is None:
        if resume:
            raise InputError("resume=True continues the run in a folder; give folder=… too")
        return
    if is_blank(folder):
        raise InputError(f"folder must be a path, not {str(folder)!r}")
    try:
        there = next((place for place in (folder, *folder.parents) if place.exists()), None)
        held = {entry.name for entry in folder.iterdir()} - LEFTOVERS if folder.is_dir() else set()
    except OSError as error:
        raise InputError(f"cannot create the folder {str(folder)!r}: {error.strerror}") from error
    if there is not None and not there.is_dir():
        raise InputError(f"cannot create the folder {str(folder)!r}: {there} is a file")
    if being_written(folder):
        raise CheckError(f"another process is writing to {folder}; wait for it, or stop it")
    if held and "manifest.json" not in held:
        raise InputError(f"{folder} holds {min(held)!r} but no manifest.json; choose another folder")
    if held and not resume:
        raise InputError(f"{folder} already holds a run; continue it with resume=True, or choose another folder")
    require_writable(there or folder, folder)


def being_written(folder: Path) -> bool:
    """True while a process has the run's folder open."""
    if not (folder / ".lock").exists():  # looking must not create the file
        return False
    from filelock import FileLock, Timeout

    try:
        FileLock(folder / ".lock").acquire(timeout=0).lock.release()
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # no permission to lock it, or a file system without locks
        return False
    return False


def require_file(path: Path) -> None:
    """Refuse the path of a file that cannot be written."""
    if path.is_dir():
        raise InputError(f"cannot write to {path}: it is a folder; name a file in it")
    require_writable(path.parent, path)


def require_writable(folder: Path, path: Path) -> None:
    """Refuse a `path` in a folder where nothing can be created, which permissions alone do not tell."""
    try:
        TemporaryFile(dir=folder).close()  # without a name, so that a kill leaves nothing
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; free space or make it writable, or use another folder"
        ) from error


def require_run(folder: Path | str) -> None:
    """Refuse a folder without the manifest of a run."""
    if is_blank(folder):
        raise InputError(f"the folder of a run must be a path, not {str(folder)!r}")
    folder = Path(folder)
    if (folder / "manifest.json").is_file():
        return
    if any((folder / lines).exists() for lines in ("records.jsonl", "log.jsonl")):
        path = folder / "manifest.json"
        raise CheckError(f"{path} is missing, so what the run measured is not known; {BEGIN_AGAIN}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder" if folder.exists() else f"no such folder: {folder}")
    message = f"{folder} is not the folder of a run: it has no manifest.json"
    found = chain(folder.glob("*/manifest.json"), folder.glob("*/*/manifest.json"))  # the folder may be a home
    if runs := sorted(path.parent for path in found):
        message += f"; it has {len(runs):,} {'run' if len(runs) == 1 else 'runs'} inside, e.g. {runs[0]}"
    raise InputError(message)


def require_address(host: str, port: int | None) -> None:
    """Refuse a host and port that a server cannot listen on."""
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"port must be from 1 to 65535, not {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        place = f"{host}, port {port}" if port else host
        raise InputError(f"cannot listen on {place}: {error}; choose another host or port") from error
