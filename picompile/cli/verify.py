"""`picompile verify`: check that an artifact is whole."""

from picompile.cli.options import ArtifactArgument, DebugOption
from picompile.cli.progress import progress
from picompile.quantities import format_bytes


def verify_command(artifact: ArtifactArgument, debug: DebugOption = False) -> None:
    """Check that an artifact is whole, hashing every byte of it.

    Ends with exit code 4 where something was changed or is missing.

    \b
    Example:
      picompile verify build/tiny
    """
    from picompile.library import open_compiled
    from picompile_runtime import verify
    from picompile_runtime.artifact.manifest import read_manifest

    folder = open_compiled(artifact)
    total = sum(entry.size_bytes for entry in read_manifest(folder).files.values())
    with progress() as shown, shown.step("hash", total) as advance:
        counted: dict[str, int] = {}

        def count(name: str, done: int, size: int) -> None:
            advance(done - counted.get(name, 0))
            counted[name] = done

        manifest = verify(folder, count)
    print(f"{folder}: whole, {len(manifest.files)} files, {format_bytes(total)}")
