"""The options of `picompile serve` and `picompile-serve`, declared once for both command lines. Imports no numpy."""

from picompile_runtime.run_options import RUN_OPTIONS, RunOption

KEY_VARIABLE = "PICOMPILE_API_KEY"

SERVE_OPTIONS = {
    option.key: option
    for option in (
        RunOption(
            ("--host",),
            kind=str,
            help="Address to listen at. Other machines reach 0.0.0.0; give a key then.",
            default="127.0.0.1",
            metavar="HOST",
            common=True,
        ),
        RunOption(
            ("--port",),
            kind=int,
            help="Port to listen at; 0 takes a free one.",
            default=8080,
            metavar="N",
            least=0,
            most=65535,
            common=True,
        ),
        RunOption(
            ("--api-key",),
            kind=str,
            help=f"Key that requests must have; repeatable. Better in {KEY_VARIABLE} or in a file: others see options.",
            default=None,
            metavar="KEY",
            repeated=True,
            common=True,
        ),
        RunOption(("--api-key-file",), kind=str, help="File with keys, one a line.", default=None, metavar="FILE"),
        RunOption(
            ("--model",),
            kind=str,
            help="One more model to serve; repeatable.",
            default=None,
            metavar="NAME=ARTIFACT",
            repeated=True,
            common=True,
        ),
        RunOption(
            ("--load",),
            kind=str,
            help="When models are loaded: all at the start; or on demand, where an idle one makes room for the next; "
            "auto loads on demand what does not fit together.",
            default="auto",
            metavar="start|demand|auto",
        ),
        RunOption(
            ("--max-loaded",),
            kind=int,
            help="Models that may be loaded at a time. Default: as many as fit.",
            default=None,
            metavar="N",
            least=1,
        ),
        RunOption(
            ("--model-memory",),
            kind=str,
            help="Memory for loaded models, as in 24GiB. Default: nine tenths of the machine's.",
            default=None,
            metavar="SIZE",
        ),
        RunOption(
            ("--keep-alive",),
            kind=str,
            help="Unload a model that no request has used for so long, as in 90s, 5m or 1h; the next request loads it "
            "again. Default: models stay loaded.",
            default=None,
            metavar="TIME",
            common=True,
        ),
        RUN_OPTIONS["threads"],
        RUN_OPTIONS["replan"],
        RunOption(
            ("--max-waiting",),
            kind=int,
            help="Requests that may wait; beyond, 429 is answered.",
            default=256,
            metavar="N",
            least=0,
            common=True,
        ),
        RunOption(
            ("--kv-memory",),
            kind=str,
            help="How much of the KV cache may be in use, as in 512MiB. Default: all.",
            default=None,
            metavar="SIZE",
            common=True,
        ),
        RunOption(
            ("--no-reread",),
            bool,
            "Do not read answers again, while there is nothing else to do, for a chat's next question to reuse.",
            False,
        ),
        RUN_OPTIONS["draft"],
        RunOption(("--max-body",), kind=str, help="Largest body of a request.", default="16MiB", metavar="SIZE"),
        RunOption(
            ("--cors",),
            kind=str,
            help="Allow pages of this origin to ask; repeatable; * allows all.",
            default=None,
            metavar="ORIGIN",
            repeated=True,
            common=True,
        ),
        RunOption(
            ("--allowed-host",),
            kind=str,
            help="Name that requests may have as Host; repeatable. Default: on localhost its names, else any.",
            default=None,
            metavar="NAME",
            repeated=True,
        ),
        RunOption(
            ("--drain-timeout",),
            kind=float,
            help="Seconds that running answers have when the server is to end.",
            default=30.0,
            metavar="S",
            least=0,
            most=86400,
        ),
        RunOption(("--quiet",), bool, "Write no line for each request to stderr.", False),
        RUN_OPTIONS["debug"],
    )
}
