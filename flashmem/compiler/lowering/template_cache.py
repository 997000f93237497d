"""Cache of compiled kernel templates: Jinja's bytecode in the user's cache folder.

Jinja compiles a template in 25 ms, and a model's kernels have about twelve. An entry is one file: the SHA-256 of its content,
then the bytecode. Its name is a hash of everything that changes the bytecode. A file of another user is never executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket, BytecodeCache

from flashmem.base.files import read_cached, written_whole
from flashmem.base.paths import TEMPLATES, cache_folder, is_foreign, make_private

_ENTRY_BYTES = 1 << 24  # larger than any template
_HASH_BYTES = 32


class TemplateCache(BytecodeCache):
    """Bytecode of templates for environments with `options`. A damaged entry is a miss; an unwritable folder keeps nothing."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.folder = cache_folder(TEMPLATES)
        self._options = repr((jinja2.__version__, sorted(options.items())))

    def load_bytecode(self, bucket: Bucket) -> None:
        """Give `bucket` its bytecode, if an entry has it."""
        with suppress(OSError):  # there is no such file, or it cannot be read
            content = read_cached(self._path(bucket), _ENTRY_BYTES)
            code = content[_HASH_BYTES:]
            if hashlib.sha256(code).digest() == content[:_HASH_BYTES]:
                bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store the bytecode of `bucket`. Without room or permission the next process compiles the template again."""
        if is_foreign(self.folder):
            return
        code = bucket.bytecode_to_string()
        with suppress(OSError):
            make_private(self.folder)
            with written_whole(self._path(bucket), private=True) as file:
                file.write(hashlib.sha256(code).digest() + code)

    def _path(self, bucket: Bucket) -> Path:
        key = repr((self._options, bucket.key))  # the bytecode itself names the text of its template and Python's version
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.bin"
