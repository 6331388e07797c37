"""The native code of an artifact: its `host.so`, the structures of its calls, and the libraries of this process."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.files import system_error
from picompile_runtime.artifact.interfaces import KernelInterface, read_interfaces
from picompile_runtime.errors import ArtifactError, KernelError, MachineError

# The shared libraries of artifacts in this process: each is loaded once, and unloaded after its last user.
#
# If dlopen has seen a name before, it returns the library that it loaded then, even when another file has that path
# now. So each library is opened through a descriptor that stays open with it: `/proc/self/fd/N` then never names two
# libraries, and no other file can get its inode number.


class SharedLibrary:
    """A loaded library. Whoever runs its code holds `turn`; `users` counts those that have not given it back yet."""

    def __init__(self, descriptor: int, key: tuple[int, int], sha256: str) -> None:
        self.code = ctypes.CDLL(_name(descriptor))
        self.turn = threading.RLock()
        self.descriptor, self.key, self.sha256 = descriptor, key, sha256
        self.users = 0


class _LoadedLibraries:
    """All loaded libraries, by device number and inode.

    Engines are garbage-collected anywhere, even by a thread that is just loading a library. So libraries that they give
    back are kept in `returned` until the holder of the lock is done.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loaded: dict[tuple[int, int], SharedLibrary] = {}
        self.returned: list[SharedLibrary] = []
        self.is_loading = False


_table = _LoadedLibraries()


def acquire(path: Path, sha256: str = "") -> SharedLibrary:
    """Return the library at `path`, and load it if it is not loaded yet. Call `give_back` afterwards.

    Args:
        path: the file.
        sha256: its hash, if known.

    Raises:
        ArtifactError: the file was loaded before with other content. It was overwritten in place, and the mapped code
            is neither the old one nor the new one.
        OSError: the file cannot be opened or loaded.
    """
    try:
        with _table.lock:
            _table.is_loading = True
            try:
                library = _load(path, sha256)
                library.users += 1
                return library
            finally:
                _table.is_loading = False
    finally:
        _unload_returned()


def give_back(library: SharedLibrary) -> None:
    """Unload the library unless it has other users."""
    _table.returned.append(library)
    _unload_returned()


def _load(path: Path, sha256: str) -> SharedLibrary:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if (known := _table.loaded.get(key)) is None:
            library = _table.loaded[key] = SharedLibrary(descriptor, key, sha256)
            return library
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    if known.sha256 != sha256:
        raise ArtifactError(
            "the file was overwritten while an engine uses it; close the engines of the artifact that was there before"
        )
    return known


def _unload_returned() -> None:
    with _table.lock:
        while _table.returned and not _table.is_loading:
            library = _table.returned.pop()
            library.users -= 1
            if library.users == 0:
                _unload(library)


def _unload(library: SharedLibrary) -> None:
    """End the library's threads, which wait in its code, and unmap it. Older libraries cannot do that, and stay."""
    stop = getattr(library.code, "pi_stop", None)
    if stop is None:
        return
    stop()
    del _table.loaded[library.key]
    _ctypes.dlclose(library.code._handle)
    with suppress(OSError):  # a library that something else keeps loaded keeps its name
        ctypes.CDLL(_name(library.descriptor), mode=os.RTLD_NOLOAD)
        return
    os.close(library.descriptor)


def _name(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _after_fork_in_child() -> None:
    """Give libraries new locks: a thread that held one does not exist in the child, and would hold it for ever."""
    _table.lock.release()
    for library in _table.loaded.values():
        library.turn = threading.RLock()


# The lock is held during a fork, so that no library is half loaded in the child.
os.register_at_fork(
    before=_table.lock.acquire, after_in_parent=_table.lock.release, after_in_child=_after_fork_in_child
)


# The native code of an artifact: its `host.so`, and the C structures that kernels take as arguments.
#
# A program is a C array of calls, built once; running it is one call of `pi_run`. The structures below are those of
# native/host.c, which are those of TVM's and DLPack's ABI.
#
#     library = HostLibrary(path)
#     calls = library.bind([("add", [step, x, y])])       # numpy arrays; kept alive by `calls`
#     library.run(calls, threads=2)


Array = NDArray[Any]
# The times when calls began and ended, int64 [calls, 2], in ns of CLOCK_MONOTONIC.
Stamps = NDArray[np.int64]

_ANY_DLTENSOR = 7  # kTVMFFIDLTensorPtr
_DL_CPU = 1  # kDLCPU
_WAITS = 1  # PI_WAITS
_DL_CODES = {"i": 0, "u": 1, "f": 2}  # numpy's kind -> DLDataTypeCode


class DLTensor(ctypes.Structure):
    """DLPack's DLTensor (dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class PiAny(ctypes.Structure):
    """TVM's TVMFFIAny: a type index and a value, here always a pointer to a DLTensor."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_void_p))


class PiCall(ctypes.Structure):
    """One kernel call of a program (host.c). `flags` has `_WAITS` if the call waits for the accelerator or the host."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("num_args", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    )


class TensorTable:
    """DLTensor descriptors of numpy arrays, one for each distinct view; it keeps them and the arrays alive."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._keep: list[Any] = []

    def descriptor(self, array: Array) -> int:
        """Return the address of the DLTensor of `array`.

        Raises ValueError unless the array is C-contiguous, aligned and of an integer or float dtype.
        """
        if not array.flags.c_contiguous or not array.flags.aligned or array.dtype.kind not in _DL_CODES:
            raise ValueError(f"a kernel cannot take this array: {array.dtype} {array.shape}, strides {array.strides}")
        key = (array.ctypes.data, array.dtype.str, array.shape)
        if key not in self._known:
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            strides = (ctypes.c_int64 * array.ndim)(*compact_strides(array.shape))
            code, bits = _DL_CODES[array.dtype.kind], 8 * array.itemsize
            tensor = DLTensor(array.ctypes.data, _DL_CPU, 0, array.ndim, code, bits, 1,
                              ctypes.addressof(shape), ctypes.addressof(strides), 0)  # fmt: skip
            self._keep += [array, shape, strides, tensor]
            self._known[key] = ctypes.addressof(tensor)
        return self._known[key]


def seconds_of(stamps: Stamps) -> NDArray[np.float64]:
    """Return how long each call took in seconds, float64 [calls]."""
    return (stamps[:, 1] - stamps[:, 0]) * np.float64(1e-9)


def _forbids_code(path: str | os.PathLike[str]) -> bool:
    """Return whether no code may be mapped from the file system that has the file."""
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False


def compact_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides in elements of a row-major tensor of this shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


class CallList:
    """A C array of calls and everything that it points to. `HostLibrary.bind` makes it."""

    def __init__(
        self,
        calls: Sequence[tuple[str, int, Sequence[Array]]],
        tensors: TensorTable,
        waits: Collection[str] = (),
        library: HostLibrary | None = None,
    ) -> None:
        self.names = [name for name, _, _ in calls]
        self.calls = (PiCall * len(calls))()
        self._keep: list[Any] = [tensors, library]
        for i, (name, kernel, arrays) in enumerate(calls):
            args = (PiAny * len(arrays))(*[PiAny(_ANY_DLTENSOR, 0, tensors.descriptor(array)) for array in arrays])
            self._keep.append(args)
            flags = _WAITS if name in waits else 0
            self.calls[i] = PiCall(kernel, ctypes.addressof(args), len(arrays), flags)

    def __len__(self) -> int:
        return len(self.names)


class HostLibrary:
    """An artifact's `host.so`: its kernels by name, and the thread pool that runs lists of calls of them.

    Check the file's hash first: the loader kills the process if a library is truncated. One list runs at a time; a
    second caller waits. The library is unloaded when its last user is closed or garbage-collected.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None, sha256: str = "") -> None:
        """Load the library at `path`, whose hash is `sha256`; errors call it `name`."""
        self.name = name or str(path)
        try:
            self._shared = acquire(Path(path), sha256)
        except ArtifactError as error:
            raise ArtifactError(f"{self.name}: {error}") from error
        except OSError as error:
            if _forbids_code(path):
                raise MachineError(
                    f"{self.name}: cannot be run: its file system is mounted with noexec, which forbids to run code "
                    "from it; copy the artifact to another file system, or remount this one with exec"
                ) from error
            raise system_error(self.name, error, "cannot be loaded as an artifact's code") from error
        self._give_back = weakref.finalize(self, give_back, self._shared)
        self._give_back.atexit = False  # other threads may still run its code
        self._library = self._shared.code
        try:
            self._run = self._library.pi_run
            self._last_error = self._library.pi_last_error
        except AttributeError as error:
            raise ArtifactError(f"{self.name}: cannot be loaded as an artifact's code ({error})") from error
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self._run.restype = ctypes.c_int
        self._last_error.restype = ctypes.c_char_p
        # Older libraries have neither.
        self._ping_pong = getattr(self._library, "pi_ping_pong", None)
        self._copy_part = getattr(self._library, "pi_copy_part", None)

    def interfaces(self) -> Mapping[str, KernelInterface] | None:
        """Return the interfaces of its kernels by name; None if the library, of another compiler, has no table."""
        try:
            table = ctypes.c_char.in_dll(self._library, "pi_kernels")
        except ValueError:
            return None
        return read_interfaces(ctypes.string_at(ctypes.addressof(table)), self.name)

    @property
    def has_ping_pong(self) -> bool:
        """Whether `ping_pong` can be called."""
        return self._ping_pong is not None

    def ping_pong(self, words: Sequence[Array], rounds: int, patience_s: float) -> tuple[int, NDArray[np.float64]]:
        """Transfer words to and from a GPU that runs the kernel `ping_pong`; see native/host.c.

        Args:
            words: ping, pong, abandoned (int32 [16] each), sent and echoed (int32 [1024] each), which the GPU sees.
            rounds: number of round trips.
            patience_s: seconds to wait for an answer.

        Returns:
            0, the round that was not answered, or the negative of the round whose answer was wrong; and the seconds of
            each round, float64 [rounds], 0 from that round on.

        Raises:
            ArtifactError: the library is too old to have the function.
        """
        if self._ping_pong is None:
            raise ArtifactError(f"{self.name}: has no code for round trips of flags; compile the model again")
        round_ns = np.zeros(rounds, np.int64)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in words]
        patience_ns = ctypes.c_int64(round(1e9 * patience_s))
        failed = self._ping_pong(*addresses, rounds, patience_ns, ctypes.c_void_p(round_ns.ctypes.data))
        return int(failed), round_ns * np.float64(1e-9)

    @property
    def copy_part(self) -> int | None:
        """The address of a function that a GPU's driver calls to copy a `CopyPart`; None if the library is too old."""
        return None if self._copy_part is None else ctypes.cast(self._copy_part, ctypes.c_void_p).value

    def kernel(self, name: str) -> int:
        """Return the address of the kernel `name`. Raises ArtifactError if the library has none."""
        try:  # escaped, since a zero byte would end the name for the loader
            function = getattr(self._library, f"__tvm_ffi_{name.encode('unicode_escape').decode()}")
        except AttributeError as error:
            raise ArtifactError(f"{self.name}: has no kernel called {name!r}; compile the model again") from error
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def bind(
        self,
        calls: Sequence[tuple[str, Sequence[Array]]],
        tensors: TensorTable | None = None,
        waits: Collection[str] = (),
    ) -> CallList:
        """Prepare a list of calls and return it.

        Args:
            calls: each a kernel's name and its arguments. Kernels expect the 64-byte alignment of
                `memory.aligned_zeros`; none may write to a read-only array.
            tensors: descriptors, which lists may share.
            waits: names of the kernels that wait for the other side. Until the last of them has run, threads do not
                sleep.

        Raises:
            ArtifactError: the library lacks a kernel.
            ValueError: an array cannot be an argument.
        """
        bound = [(name, self.kernel(name), arrays) for name, arrays in calls]
        return CallList(bound, tensors or TensorTable(), waits, self)

    def turn(self) -> AbstractContextManager[bool]:
        """Return a context in which nobody else runs a list: a step runs another list on the accelerator meanwhile."""
        return self._shared.turn

    def close(self) -> None:
        """Give the library back; it is unloaded after its last user. Only `close` may be called afterwards."""
        if self._give_back.alive:
            del self._library, self._run, self._last_error, self._ping_pong, self._copy_part
            self._give_back()

    def run(self, calls: CallList, threads: int, stamps: Stamps | None = None) -> None:
        """Run all calls in order on `threads` threads. Raises KernelError if one fails.

        `stamps`, int64 [calls, 2], gets the times when each call began and ended, in ns of the clock of
        `time.monotonic_ns`.
        """
        if stamps is not None and (stamps.dtype != np.int64 or stamps.shape != (len(calls), 2)):
            raise ValueError(f"stamps must be int64 [{len(calls)}, 2], not {stamps.dtype} {list(stamps.shape)}")
        if stamps is not None and not stamps.flags.c_contiguous:
            raise ValueError("stamps must be C-contiguous")
        with self._shared.turn:
            failed = self._run(calls.calls, len(calls), threads, None if stamps is None else stamps.ctypes.data)
            if failed != -1:
                where = f"call {failed}, kernel {calls.names[failed]}" if failed >= 0 else "thread pool"
                reason = " ".join((self._last_error() or b"").decode(errors="replace").split())
                raise KernelError(f"{where}: {reason}")
