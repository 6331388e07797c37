"""From CUDA kernels to code: the source, NVRTC, what a cubin says of its functions, and the files of an artifact."""

import json
import sys
from pathlib import Path

import pytest

from picompile_codegen.cpu.tensor import bind, when
from picompile_codegen.cuda import build as toolchain
from picompile_codegen.cuda.build import Resources, build_cuda, compile_cuda, cuda_source, function_resources
from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.errors import BuildError, CodegenError, ToolchainError

# 200 numbers of a thread that are found by a computed index cannot be in registers. Of `local` ptxas 13.0 printed 254
# registers, a stack frame of 800 bytes and 308 bytes of shared memory for sm_89, of `none` 8 registers.
SOURCE = """
extern "C" __global__ void local(float *a, int n) {
  float b[200];
  for (int i = 0; i < 200; i++) b[i] = a[i * n];
  for (int k = 0; k < n; k++) for (int i = 0; i < 200; i++) b[i] = b[(i * 7 + k) % 200] * 2.f + a[k];
  float s = 0;
  for (int i = 0; i < 200; i++) s += b[i];
  __shared__ float t[77];
  t[threadIdx.x] = s;
  __syncthreads();
  a[threadIdx.x] = t[threadIdx.x ^ 1];
}
extern "C" __global__ void none(float *a) { a[threadIdx.x] *= 2; }
"""


def _doubled() -> CudaKernel:
    """y = 2 x, and then y = 2 y: two launches."""
    function = CudaFunction("doubled", 100)
    with function:
        x, y = function.floats("x", 1, 100), function.floats("y", 1, 100)
        for source in (x, y):
            with function.launch(grid=4, block=32, resident=3) as place:
                i = bind(place.block * 32 + place.thread)
                with when(i < 100):
                    y[0, i] = source[0, i] * 2.0
    return function.kernel()


def test_a_kernel_becomes_its_launches() -> None:
    source = cuda_source([_doubled()])
    first, second = source.launches["doubled_100"]
    # The arguments are step, x and y; parameters are in TVM's order, and only those that are used.
    assert (sorted(first.args), second.args) == ([1, 2], (2,))
    assert (first.grid.x, first.grid.threads) == (4, 32)
    for launch in (first, second):
        assert source.text.count(f" {launch.symbol}(") == 1, "a declaration was left behind"
    assert "tvm" not in source.text.lower().replace("tvm's", "").replace("tvm gives", "")
    assert source.text.count("__launch_bounds__(32, 3)") == 2


@pytest.mark.parametrize(("grid", "block"), [(0, 32), (1, 31), (1, 0), (1, 1056), ((1, 0), 32), ((1, 65536), 32)])
def test_launches_beyond_the_limits_of_gpus_are_refused(grid: int | tuple[int, int], block: int) -> None:
    function = CudaFunction("odd")
    with function, pytest.raises(CodegenError, match="cannot be launched"), function.launch(grid=grid, block=block):
        pass


def test_resources_are_those_that_ptxas_prints() -> None:
    cubin, ptx = compile_cuda(SOURCE, 89)
    assert function_resources(cubin) == {"local": Resources(254, 800, 308), "none": Resources(8, 0, 0)}
    assert b".target sm_89" in ptx
    for data in (b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF" + bytes(300)):
        with pytest.raises(BuildError, match="returned no cubin"):
            function_resources(data)


@pytest.mark.parametrize("sm", [75, 90])
def test_memory_is_ordered_by_releases_and_acquires_alone(sm: int) -> None:
    """`__threadfence` also orders stores before later loads, which takes longer and which no kernel needs."""
    kernel = """extern "C" __global__ void all(int *a) {
      a[1] = pi_is_last(a + 2, 7);
      pi_wait(a + 3, a + 16, 1);
      pi_signal(a + 4, 1);
    }"""
    ptx = compile_cuda(cuda_source([]).text + kernel, sm)[1].decode()
    for instruction in ("atom.acq_rel.gpu.global.inc.u32", "st.release.sys.global.s32", "fence.acq_rel.sys"):
        assert instruction in ptx
    assert "membar" not in ptx
    assert "fence.sc" not in ptx


def test_errors_of_the_compiler_are_one_line() -> None:
    with pytest.raises(BuildError, match='identifier "g" is undefined') as caught:
        compile_cuda('extern "C" __global__ void f() { g(); }', 89)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_HEADERS", "nvidia.no_such_package")
    for missing in ("headers", "cuda.bindings"):
        if missing != "headers":
            monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ToolchainError, match="pip install 'cuda-bindings>") as caught:
            toolchain.require_nvrtc()
        assert caught.value.exit_code == 6


def test_the_files_of_an_artifact(tmp_path: Path) -> None:
    names = build_cuda([_doubled()], tmp_path, 75)
    launches = json.loads((tmp_path / names["launches"]).read_text())
    assert (launches["sm"], launches["ptx_sm"]) == (75, 75)
    first = launches["kernels"]["doubled_100"][0]
    assert (first["grid"], first["block"], first["local_bytes"]) == ([4, 1, 1], [32, 1, 1], 0)
    assert (tmp_path / names["cubin"]).read_bytes()[:4] == b"\x7fELF"
    ptx = (tmp_path / names["ptx"]).read_text(encoding="ascii")
    assert ".version" in ptx and "\0" not in ptx, "no file of text"
    again = tmp_path / "again"
    again.mkdir()
    build_cuda([_doubled()], again, 75)
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), "the same input gives other bytes"
