"""Run commands and code in forks of one process that has imported PyTorch, which takes seconds each time.

`python -m tests.forked SOCKET` is the process. `python tests/forked.py SOCKET ARGUMENT...` runs `tcnca ARGUMENT...` in
a fork of it, and `python tests/forked.py SOCKET -c CODE` runs Python: in the working directory and with the standard
input and output of the caller, and with its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback

_MAX_REQUEST = 2**20


def main() -> None:
    """Serve, or ask for a fork."""
    path, *arguments = sys.argv[1:]
    serve(path) if not arguments else sys.exit(ask(path, arguments))


def ask(path: str, arguments: list[str]) -> int:
    """Run a command in a fork of the server, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps([os.getcwd(), arguments]).encode()], [0, 1, 2])
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or b"70")


def serve(path: str) -> None:
    """Answer until the process is ended."""
    import matplotlib.figure  # noqa: F401

    import tcnca.__main__
    import tcnca.cli
    import tcnca.inference
    import tcnca.training.report  # noqa: F401

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            # The child of the child runs the command, so that nobody has to wait for it.
            if (child := os.fork()) == 0:
                if os.fork() == 0:
                    _run(connection)
                os._exit(0)
            connection.close()
            os.waitpid(child, 0)


def _run(connection: socket.socket) -> None:
    code = 70
    with contextlib.suppress(BaseException):
        request, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 3)
        while more := connection.recv(_MAX_REQUEST):
            request += more
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        # Those of the server may be of another kind, such as a file that can be sought in.
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        folder, arguments = json.loads(request)
        os.chdir(folder)
        code = _execute(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    connection.sendall(str(code).encode())
    os._exit(0)


def _execute(arguments: list[str]) -> int:
    import tcnca.__main__

    try:
        if arguments[0] == "-c":
            exec(compile(arguments[1], "<code>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = ["tcnca", *arguments]
            tcnca.__main__.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
