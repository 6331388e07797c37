"""The process that renders one chat template, under limits; see chat_template.py. It imports nothing of this package.

The first line of its input is a JSON object with `path` (Python's), `template`, `tokens` and `limits`. Each later line
has the arguments of one rendering; the process answers with a line that has `text` or `error`.
"""

import json
import math
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any


def _renderer(template: str, tokens: dict[str, Any], most_letters: int) -> Callable[..., str]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The environment is that of transformers (utils/chat_template_utils.py), since templates are written for it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    compiled = environment.from_string(template)

    def render(**arguments: Any) -> str:
        pieces, letters = [], 0
        for piece in compiled.generate(**arguments, **tokens):
            pieces.append(piece)
            letters += len(piece)
            if letters > most_letters:
                raise ValueError(f"the text has more than {most_letters} characters")
        return "".join(pieces)

    return render


def _allow(cpu_s: int) -> None:
    """Allow the process `cpu_s` more seconds of processor time; after that the system ends it by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + cpu_s)


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process. A lower limit that the user has set stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all its processes
    start = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = start["path"]
    limits = start["limits"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    render = None
    while line := sys.stdin.buffer.readline():
        _allow(limits["cpu_s"])
        try:
            render = render or _renderer(start["template"], start["tokens"], limits["letters"])
            answer = {"text": render(**json.loads(line))}
        except MemoryError:
            answer = {"error": f"it takes more than {limits['memory_bytes'] >> 20} MiB of memory"}
        except Exception as error:  # a template is a program, and can fail like any other
            answer = {"error": " ".join(str(error).split())[:1000] or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
