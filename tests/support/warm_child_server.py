"""The process that warm_children.py forks programs from: `python warm_child_server.py SOCKET MODULE...`.

It imports the modules, then starts one program for each message, and answers with the program's process id and, once
the program has ended, with its exit status (negative: a signal), 8 bytes each.

Note: how a child becomes the program
  1. `serve` returns in the child alone, so that the program runs at the bottom of the interpreter's stack and ends as
     the interpreter does.
  2. The server computes nothing, so it has no threads that a child would lack. Those of OpenBLAS, which numpy brings,
     OpenBLAS itself stops for a fork.
  3. What torch does at the end of its import for installed packages (the entry points "torch.backends") was done
     without the program's variables; the child does it again with them. `sys.orig_argv` is the program's by then:
     delta_runtime_autoload tells by it whether the process is a helper of another one.
"""

import gc
import importlib
import json
import os
import random
import runpy
import socket
import struct
import sys
import types


def serve(channel):
    """The request of a program, in the child that is to become it."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, 1, 3)
        except ConnectionError:
            message = b""
        if not message:
            sys.exit()
        child = os.fork()
        if child == 0:
            channel.close()
            return redirected(descriptors)
        for each in descriptors:
            os.close(each)
        try:
            channel.sendall(struct.pack("<q", child))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            channel.sendall(struct.pack("<q", status))
        except ConnectionError:  # nobody waits for it any more
            sys.exit()


def redirected(descriptors):
    """The request; standard output and error go to the files that came with it."""
    asked, out, err = descriptors
    with os.fdopen(asked) as file:
        request = json.load(file)
    for there, here in ((out, 1), (err, 2)):
        os.dup2(there, here)
        os.close(there)
    return request


def become(request, own_path):
    """Take over the folder, environment and import path of a program."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *arguments = request["arguments"]
    folder = os.path.dirname(os.path.abspath(first)) if not first.startswith("-") else ""
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [folder if first != "-m" else os.getcwd(), *added, *own_path]
    sys.argv[:] = [first] + (arguments[1:] if first in ("-c", "-m") else arguments)
    importlib.invalidate_caches()
    sys.orig_argv[:] = [sys.executable, *request["arguments"]]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "OMP_NUM_THREADS" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1" and "torch" in sys.modules:
        sys.modules["torch"]._import_device_backends()  # note 3


def run_program(request):
    """Run it as `__main__`."""
    first, *arguments = request["arguments"]
    if first == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if first == "-c":
        code = compile(arguments[0], "<string>", "exec")
    else:
        main.__file__ = os.path.abspath(first)
        with open(first, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


if __name__ == "__main__":
    own_path = sys.path[1:]  # without this file's folder
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy each page that it looks at
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request, own_path)
    run_program(request)
