"""Builds the extension `delta_runtime._C` from csrc/; everything else is in pyproject.toml.

Only the headers that torch ships are used: no CUDA toolkit, no nvcc. Where torch is a build for CUDA and CUDA's own
headers are there too (in a toolkit, or from `pip install nvidia-cuda-crt`), `delta_runtime._cuda` is built from
csrc/cuda/ beside it; the package works without. With ninja the files compile
in parallel (MAX_JOBS, by default one per core) and only what changed is compiled again. The files of a
folder of csrc/ are compiled as one: most of the time goes into torch's headers, which are read once then.

    pip install torch
    pip install setuptools wheel ninja
    pip install --no-build-isolation -e .
"""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup


def stop(problem: str, remedy: str) -> NoReturn:
    sys.exit(f"\ndelta_runtime cannot be built: {problem}\n{remedy}\n")


try:
    import torch
    from torch.utils.cpp_extension import (
        CUDA_HOME,
        BuildExtension,
        CppExtension,
        get_cxx_compiler,
    )
except ImportError as error:
    stop(
        f"torch cannot be imported ({error}).",
        "Install torch first, then build without isolation, so that the extension is compiled "
        "against the\ntorch it will run with:\n"
        "    pip install torch setuptools wheel ninja\n"
        "    pip install --no-build-isolation .",
    )

# -DNDEBUG: the layout of at::RecordFunction depends on it, and torch's own binaries have it set.
# -g1: line tables for stack traces, a tenth of the size of full debug information.
COMPILE_FLAGS = ["-O3", "-DNDEBUG", "-g1", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]


CUDA_FOLDER = Path("csrc", "cuda")  # an extension of its own


def require_toolchain() -> None:
    compiler = shlex.split(get_cxx_compiler())[0]
    if shutil.which(compiler) is None:
        stop(
            f"the C++ compiler {compiler!r} is not there.",
            "Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name "
            "yours:\n    CXX=/path/to/g++ pip install --no-build-isolation .",
        )
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stop(
            f"Python.h is not in {include}.",
            f"Install the headers of this Python (Debian, Ubuntu: apt install python{version}-dev; "
            "Fedora:\ndnf install python3-devel), or use a Python that has them.",
        )


def joined_sources(folder: Path) -> list[str]:
    """Write a file for each folder of csrc/ that includes the folder's; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if astray := set(Path("csrc").rglob("*.cpp")) - set(Path("csrc").glob("*/*.cpp")):
        stop(f"{min(astray)} is not in a folder of csrc/.", "Move it into one.")
    for each in sorted({path.parent for path in Path("csrc").glob("*/*.cpp")} - {CUDA_FOLDER}):
        names = sorted(path.name for path in each.glob("*.cpp"))
        text = "".join(f'#include "{each.name}/{name}"\n' for name in names)
        path = folder / f"{each.name}.cpp"
        if not path.exists() or path.read_text() != text:  # what is as it was is not compiled again
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(path)
        paths.append(path.as_posix())
    return paths


def cuda_headers() -> str | None:
    """Return where CUDA's headers are: in a toolkit, or as pip installs them beside torch; None: nowhere."""
    places = [Path(home, "include") for home in (CUDA_HOME, "/usr/local/cuda") if home]
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or []) if nvidia else []:
        places += [*Path(root).glob("cu*/include"), Path(root, "cuda_runtime", "include")]
    for place in places:
        if (place / "cuda_runtime_api.h").exists() and (place / "crt" / "host_config.h").exists():
            return str(place)
    return None


def extensions() -> list[Extension]:
    found = [
        CppExtension(
            "delta_runtime._C",
            sources=joined_sources(Path("build", "joined")),
            depends=sorted(glob("csrc/*/*.cpp") + glob("csrc/*/*.h")),
            include_dirs=[os.path.abspath("csrc")],
            extra_compile_args=COMPILE_FLAGS,
        )
    ]
    if torch.version.cuda is None:
        return found
    headers = cuda_headers()
    if headers is None:
        print("delta_runtime._cuda is not built: CUDA's headers are not here (nvidia-cuda-crt).")
        return found
    return [
        *found,
        CppExtension(
            "delta_runtime._cuda",
            sources=sorted(path.as_posix() for path in CUDA_FOLDER.glob("*.cpp")),
            depends=["csrc/pool/limited_allocator.h"],
            include_dirs=[os.path.abspath("csrc"), headers],
            libraries=["c10_cuda"],
            extra_compile_args=COMPILE_FLAGS,
            optional=True,
        ),
    ]


class Build(BuildExtension):
    def run(self) -> None:
        require_toolchain()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ.setdefault("MAX_JOBS", str(cores or 1))
        # An editable install would build in a new temporary folder each time, all from scratch. One
        # folder per Python and torch keeps what has not changed.
        self.build_temp = os.path.join(
            "build", f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        )
        # One of an earlier build may be of another torch, or of other files of csrc/.
        for folder in (Path(), Path(self.build_lib)):
            for old in folder.glob("delta_runtime/_cuda.*.so"):
                old.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except RuntimeError as error:  # of ninja
            if not ext.optional:
                raise
            print(f"{ext.name} is not built: {error}")


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
)
