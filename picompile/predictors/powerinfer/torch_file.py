"""A first look at a file of `torch.save`: a zip archive of uncompressed entries, one of them a pickle.

The pickle itself is read in the guarded process, by torch's reader for tensors alone.
"""

import zipfile
from pathlib import Path

from picompile.errors import UsageError

# A state dict of two matrices pickles into 500 bytes.
_LARGEST_PICKLE_BYTES = 64 << 10
_MOST_ENTRIES = 64


def check_torch_file(file: Path) -> None:
    """Check the archive. Raises `UsageError`, in one line, for any other file, and for one larger inside than out."""
    if not file.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{file}: not a file")
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise UsageError(f"{file}: not a file of torch.save: {error}") from error
    pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(pickles) != 1 or len(entries) > _MOST_ENTRIES:
        raise UsageError(f"{file}: not a file of torch.save: {len(pickles)} pickles in {len(entries)} entries")
    if pickles[0].file_size > _LARGEST_PICKLE_BYTES:
        raise UsageError(f"{file}: a pickle of {pickles[0].file_size:,} bytes is more than a few tensors need")
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > size:
        raise UsageError(f"{file}: its entries are compressed or larger than the file; torch.save writes none such")
