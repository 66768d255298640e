"""Checkpoints as files: one for each rank, and a manifest, which is written last.

    save(folder, weights, state, {"step": 50, ...})     on every rank, with whole tensors
    about = read_manifest(folder, model)                 anywhere, without torch's process group
    weights, state = load(folder)                        on any number of ranks, or without any

Tensors are whole and in the layout of plain torch: weights by name, and the optimizer's state by parameter number. Each
rank writes every N-th of them. So neither the number of ranks nor the engine that has written a checkpoint matters.

A file is written under a temporary name, brought to the disk, and renamed. The manifest names the files of the last
complete checkpoint. Only when it has replaced the one before, rank 0 removes the files that it does not name.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from brigade.ranks.errors import UserError

VERSION, MANIFEST = 1, "manifest.json"

State = dict[int, dict[str, Any]]  # of an optimizer, by parameter number


def save(folder: Path, weights: Mapping[str, Tensor], state: State, about: Mapping[str, Any]) -> None:
    """Write a checkpoint. All ranks call this with the same whole tensors.

    `about` goes to the manifest. It contains the number of the "step" and the "model". Raise UserError on all ranks
    if one of them cannot write. The checkpoint before is then still complete.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {
        "model": {name: copy_to_cpu(weights[name]) for name in [*weights][rank::size]},
        "state": {
            number: {key: copy_to_cpu(value) for key, value in state[number].items()}
            for number in sorted(state)[rank::size]
        },
    }
    torch.save(own, data := io.BytesIO())
    name = f"step-{about['step']}-rank-{rank}-of-{size}.pt"
    written = agree(lambda: write_file(folder / name, data.getvalue()))
    files = {f"step-{about['step']}-rank-{other}-of-{size}.pt": nbytes for other, nbytes in enumerate(written)}
    agree(lambda: complete(folder, {**about, "version": VERSION, "files": files}) if rank == 0 else None)


def copy_to_cpu(value: Any) -> Any:
    """Return a copy of a tensor without the memory around it, such as a bucket, and other values as they are."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def agree(call: Callable[[], Any]) -> list[Any]:
    """Return what `call` returns on each rank. If it raises OSError on one of them, raise UserError on all."""
    result, problem = None, ""
    try:
        result = call()
    except OSError as error:
        problem = f"{error.filename} cannot be written: {error.strerror}"
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (result, problem))
    for _, problem in results:
        if problem:
            raise UserError(f"{problem}; what was saved before is still complete")
    return [result for result, _ in results]


def write_file(path: Path, data: bytes) -> int:
    """Write a file, and return its size. A kill at any moment leaves the old file, or none, or the whole new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # the content must be on the disk before the name
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return len(data)


def complete(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, which makes its files the valid checkpoint. Then remove the files of other checkpoints."""
    write_file(folder / MANIFEST, json.dumps(manifest).encode())
    for file in folder.glob("step-*-rank-*-of-*"):
        if file.name not in manifest["files"]:
            file.unlink()


def read_manifest(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of the checkpoint in a folder. Raise UserError without a complete one of this model."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        version = manifest["version"]
        files = manifest["files"].items() if version == VERSION else ()
    except FileNotFoundError:
        is_begun = any(folder.glob("step-*-rank-*"))
        missing = f", only files without {MANIFEST}, which is written last" if is_begun else ""
        raise UserError(f"{folder} contains no complete checkpoint{missing}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not the manifest of a checkpoint") from None
    if version != VERSION:
        raise UserError(f"{path} has version {version}: this course reads version {VERSION}, so update it first")
    if manifest.get("model") != model:
        raise UserError(f"{path} is of another model: {manifest.get('model')}, not {model}")
    for name, nbytes in files:
        if not (folder / name).is_file():
            raise UserError(f"the checkpoint is incomplete: {folder / name} is missing")
        if (found := (folder / name).stat().st_size) != nbytes:
            raise UserError(f"the checkpoint is damaged: {folder / name} has {found} bytes instead of {nbytes}")
    return manifest


def load(folder: Path) -> tuple[dict[str, Tensor], State]:
    """Return the weights by name and the optimizer's state by parameter number, whole and on the CPU."""
    weights: dict[str, Tensor] = {}
    state: State = {}
    for name in json.loads((folder / MANIFEST).read_text())["files"]:
        try:
            part = torch.load(folder / name, weights_only=True)
        except Exception:  # torch documents no type
            raise UserError(f"the checkpoint is damaged: torch cannot read {folder / name}") from None
        weights |= part["model"]
        state |= part["state"]
    return weights, state
