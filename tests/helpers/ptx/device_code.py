"""The code for the GPU of an artifact or a pack: PTX, cubin, and how kernels are launched."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.ptx.loads import LaunchRole, wrong_loads
from helpers.ptx.syntax import PtxKernel

# What the host writes while a kernel runs that awaits a flag.
_FROM_HOST = frozenset({"source", "sent"})


@dataclass(frozen=True)
class DeviceCode:
    """`description` is the content of device.json."""

    name: str
    ptx: str
    cubin: bytes
    description: Mapping[str, Any]

    @property
    def sm(self) -> int:
        return int(self.description["sm"])

    def roles(self) -> dict[str, LaunchRole]:
        """Return the role of each launch by its symbol: what its parameters are."""
        interfaces = self.description["interfaces"]
        # The interface of the runtime's own kernel is not written: its waits are found by the loads alone.
        return {
            launch["symbol"]: _role(interfaces[name]["args"], launch["args"])
            for name, launches in self.description["kernels"].items()
            if name in interfaces
            for launch in launches
        }

    def wrong_loads(self, kernels: Iterable[PtxKernel]) -> list[str]:
        """Return a line for each parameter of `kernels` that is read in a way that may give an old value."""
        roles = self.roles()
        return [line for kernel in kernels for line in wrong_loads(kernel, roles.get(kernel.name))]


def _role(arguments: list[dict[str, Any]], places: list[int]) -> LaunchRole:
    names = [arguments[place]["name"] for place in places]
    awaits = any(arguments[place].get("access") == "awaits" for place in places)
    return LaunchRole(names, _FROM_HOST & frozenset(names) if awaits else frozenset())


def code_in_folder(folder: Path) -> DeviceCode:
    """Return what `build_cuda` wrote to `folder`."""
    ptx, description = (_text((folder / f"device.{kind}").read_bytes()) for kind in ("ptx", "json"))
    return DeviceCode(folder.name, ptx, (folder / "device.cubin").read_bytes(), json.loads(description))


def code_of_pack(pack: Path) -> Iterator[DeviceCode]:
    """Yield the code in each archive of a pack: kernels that are run one by one, then models."""
    for path in sorted(pack.glob("*.zip"), key=lambda path: (path.stem not in ("small", "speed"), path.stem)):
        with zipfile.ZipFile(path) as archive:
            folders = [name.removesuffix("device.ptx") for name in archive.namelist() if name.endswith("device.ptx")]
            for folder in folders:
                ptx, cubin, description = (archive.read(f"{folder}device.{kind}") for kind in ("ptx", "cubin", "json"))
                yield DeviceCode(path.stem, _text(ptx), cubin, json.loads(description))


def _text(content: bytes) -> str:
    """Return a text; NVRTC's end with a zero."""
    return content.rstrip(b"\0").decode()
