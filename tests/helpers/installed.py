"""A package with entry points, as pip leaves it on the path."""

from pathlib import Path


def install(folder: Path, module: str, source: str, group: str, points: tuple[str, ...]) -> str:
    """Write a package `module`-1.0, whose code is `source` and whose entry points in `group` are `points`."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(points) + "\n")
    return str(folder)
