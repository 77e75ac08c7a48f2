"""Turns delta_runtime on from the environment, at the end of ``import torch``.

PyTorch calls `_autoload` through the entry point group ``torch.backends``, in every process that
imports torch. With DELTA_BUDGET set it starts the ambient runtime; without it, it does nothing, but
says so where the name was misspelt.

Covers when to start, and that nothing that goes wrong here can hurt ``import torch``. Does not
cover what the variables mean: see delta_runtime/config.py.

Note: starting at the end of ``import torch``
  1. An exception here would make ``import torch`` fail for everybody: every failure becomes one
     warning, and the runtime stays off. What a signal handler of the program raises is not ours.
  2. This module is found without importing the package, because the package may be the very one
     that is importing torch; it imports nothing but os until there is something to start.
  3. When a module of delta_runtime was imported first, it is only half there now. The start is then
     put off, and `resume`, which the last lines of delta_runtime/runtime.py and ambient.py and the lazy attributes
     of delta_runtime/__init__.py call, makes up for it.
  4. Helper processes that inherit the environment but train nothing stay off: children of
     multiprocessing (data-loader workers), launchers (their workers start by themselves),
     compile workers. Processes that torch.multiprocessing.spawn starts cannot be told from
     data-loader workers: use `delta_runtime.Runtime` in their function.
"""

import os

_TOLD = False  # of variables that are none of ours: once a process
_DONE = False  # started, failed and told, or left to the command line: one attempt a process
_PENDING = False  # put off by rule 3

_LAUNCHER_PROGRAMS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
_CHILD_MARKS = (
    "--multiprocessing-fork",
    "from multiprocessing.forkserver import",
    "from multiprocessing.resource_tracker import",
    "loky.backend",
)


def _autoload() -> None:
    """Start the ambient runtime if DELTA_BUDGET asks for it. Never raises."""
    global _PENDING
    budget = os.environ.get("DELTA_BUDGET", "").strip().lower()
    if _DONE or budget == "off" or not (budget or _has_variables()):
        return
    try:
        if _is_helper_process():
            return
        if _package_is_half_imported():
            _PENDING = bool(budget)
            return
        tell_of_unknown()
    except Exception as error:  # rule 1
        _warn(error)
        return
    if budget:
        _attempt()


def _has_variables() -> bool:
    return any(name.startswith("DELTA_") for name in os.environ)


def tell_of_unknown() -> None:
    """Warn of DELTA_* variables that are none of ours, once a process."""
    global _TOLD
    if _TOLD or os.environ.get("LOCAL_RANK", "0") != "0":  # one of several says it
        return
    _TOLD = True
    from delta_runtime.config import told_of_unknown

    if told := told_of_unknown(os.environ):
        _say(f"delta_runtime: {told}")


def resume() -> None:
    """Start what `_autoload` had to put off because the package was half imported. Never raises."""
    global _PENDING
    if _PENDING and not _DONE:
        _PENDING = False
        try:
            tell_of_unknown()
        except Exception as error:  # rule 1
            _warn(error)
        _attempt()


def hold() -> None:
    """Leave the start to the caller: the command line, which reports errors in its own way."""
    global _DONE
    _DONE = True


def _attempt() -> None:
    global _DONE
    _DONE = True
    try:
        _start()
    except Exception as error:  # rule 1
        _warn(error)


def _start() -> None:
    from delta_runtime.config import Config

    if Config.from_environment(os.environ) is None:  # a bad value is told before torch is touched
        return
    from delta_runtime.ambient import start_ambient

    start_ambient()


def _is_helper_process() -> bool:
    """Whether this process only serves another one (rule 4)."""
    import sys

    # parent_process() is still None while a spawned child imports the parent's main module, which
    # is when torch is imported; the command line tells from the beginning.
    command = getattr(sys, "orig_argv", None) or sys.argv
    if any(mark in argument for argument in command for mark in _CHILD_MARKS):
        return True
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        return True
    return _is_launcher(command)


def _is_launcher(command: list[str]) -> bool:
    """Whether the command line is that of a launcher or a compile worker: python -m X, or X."""
    program_at = 1
    while program_at < len(command) and command[program_at].startswith("-"):
        option = command[program_at]
        if option in ("-m", "-c"):
            break
        program_at += 2 if option in ("-W", "-X") else 1
    if program_at >= len(command):
        return False
    program = command[program_at]
    if program == "-m":
        return command[program_at + 1 : program_at + 2] in [[name] for name in _LAUNCHER_MODULES]
    path = program.replace("\\", "/")
    name = path.rsplit("/", 1)[-1].removesuffix(".exe").removesuffix("-script.py")
    dotted = path.removesuffix(".py").replace("/", ".")
    return (
        name in _LAUNCHER_PROGRAMS
        or any(dotted.endswith("." + module) for module in _LAUNCHER_MODULES)
        or path.endswith("/_inductor/compile_worker/__main__.py")
    )


def _package_is_half_imported() -> bool:
    """Whether a module of delta_runtime is being imported right now (rule 3)."""
    import sys

    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name == "delta_runtime" or name.startswith("delta_runtime.")
    )


def _warn(error: Exception) -> None:
    if _is_of_a_signal(error):
        raise error
    _say(f"delta_runtime stays off: {type(error).__name__}: {error}")


def _is_of_a_signal(error: Exception) -> bool:
    """Whether a signal handler of the program raised it: then it is the program's, whenever it came."""
    import signal

    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    codes = [getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _say(message: str) -> None:
    import sys
    import warnings

    try:
        # Not the line inside torch that called us: the environment is what is to be changed.
        warnings.warn_explicit(message, RuntimeWarning, "<environment>", 0, module=__name__)
    except Exception:  # warnings are errors here; rule 1 weighs more
        print(message, file=sys.stderr)
