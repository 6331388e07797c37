"""Errors of code generation."""


class CodegenError(Exception):
    """Something that only a bug in picompile can cause: the graphs that reach code generation have been verified."""

    exit_code = 1


class BuildError(CodegenError):
    """Kernels did not compile or link; the message is the compiler's."""


class ToolchainError(BuildError):
    """This machine lacks the compiler that the code for a target needs."""

    exit_code = 6


class TemporaryFolderError(CodegenError):
    """There is no folder for temporary files, or none that takes more."""

    exit_code = 5
