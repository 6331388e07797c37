"""The options of `picompile serve` and `picompile-serve`, declared once for both command lines. Imports no numpy."""

from picompile_runtime.run_options import RUN_OPTIONS, RunOption

KEY_VARIABLE = "PICOMPILE_API_KEY"

SERVE_OPTIONS = {
    option.key: option
    for option in (
        RunOption(
            ("--host",),
            str,
            "Address to listen at. Other machines reach 0.0.0.0; give a key then.",
            "127.0.0.1",
            "HOST",
        ),
        RunOption(("--port",), int, "Port to listen at; 0 takes a free one.", 8080, "N", least=0, most=65535),
        RunOption(
            ("--api-key",),
            str,
            f"Key that requests must have; repeatable. Better in {KEY_VARIABLE} or in a file: others see options.",
            None,
            "KEY",
            repeated=True,
        ),
        RunOption(("--api-key-file",), str, "File with keys, one a line.", None, "FILE"),
        RunOption(("--model",), str, "One more model to serve; repeatable.", None, "NAME=ARTIFACT", repeated=True),
        RUN_OPTIONS["threads"],
        RUN_OPTIONS["replan"],
        RunOption(("--max-waiting",), int, "Requests that may wait; beyond, 429 is answered.", 256, "N", least=0),
        RunOption(
            ("--kv-memory",), str, "How much of the KV cache may be in use, as in 512MiB. Default: all.", None, "SIZE"
        ),
        RunOption(
            ("--no-reread",),
            bool,
            "Do not read answers again, while there is nothing else to do, for a chat's next question to reuse.",
            False,
        ),
        RUN_OPTIONS["draft"],
        RunOption(("--max-body",), str, "Largest body of a request.", "16MiB", "SIZE"),
        RunOption(
            ("--cors",),
            str,
            "Allow pages of this origin to ask; repeatable; * allows all.",
            None,
            "ORIGIN",
            repeated=True,
        ),
        RunOption(
            ("--allowed-host",),
            str,
            "Name that requests may have as Host; repeatable. Default: on localhost its names, else any.",
            None,
            "NAME",
            repeated=True,
        ),
        RunOption(
            ("--drain-timeout",),
            float,
            "Seconds that running answers have when the server is to end.",
            30.0,
            "S",
            least=0,
            most=86400,
        ),
        RUN_OPTIONS["debug"],
    )
}
