"""The real apex as an implementation under test: which one is installed, which revisions it gives.

``find_apex`` looks at files and package metadata only, so that it works, and says what is wrong,
where ``import apex`` fails. Several packages are called apex: NVIDIA's until 2025-05-08, with
``amp`` and ``parallel``; NVIDIA's since then, without; and on PyPI a toolkit for Pyramid web
applications.

``loading.py`` imports it in the child process of an experiment, with the wanted revision of
``sync_batchnorm.py`` (``source_of``) in the place of the installed one, in memory. Nothing is
ever written into the installed package.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.implementations import IMPLEMENTATIONS, revisions

DESCRIPTION = IMPLEMENTATIONS["apex"]
"""What this implementation is, and the autograd node that proves that it ran."""

_PIP_INSTALL = "`pip install --no-deps --require-hashes -r requirements-apex.txt`"
_SOURCES = (
    f"{_PIP_INSTALL} (pure Python), conda-forge's `nvidia-apex` (Linux with CUDA), or build "
    "NVIDIA/apex at tag 25.05, the last with amp and parallel"
)
_CURES: dict[str, str] = {
    "absent": f"Install one with {_SOURCES}.",
    "pyramid": "Uninstall the Pyramid toolkit that PyPI calls apex (`pip uninstall apex`), then "
    f"install NVIDIA's with {_SOURCES}.",
    "without amp": "Uninstall this apex (`pip uninstall apex`; NVIDIA removed amp and parallel on "
    f"2025-05-08), then install one that has them with {_SOURCES}.",
    "other": "Remove or rename it, or start Python from another folder if it is a plain folder "
    f"called apex, then install NVIDIA's apex with {_SOURCES}.",
}
_WHAT: dict[str, str] = {
    "usable": "apex is NVIDIA's with amp and parallel",
    "absent": "no apex is installed",
    "pyramid": "apex is a toolkit for Pyramid web applications, not NVIDIA's",
    "without amp": "apex is NVIDIA's without amp or parallel",
    "other": "apex is neither NVIDIA's nor the Pyramid toolkit",
}

_NO_AMP = (
    "The apex that Python found has no amp and no parallel: NVIDIA's after 2025-05-08, the "
    "Pyramid toolkit from PyPI, or a plain folder called apex."
)
SYMPTOMS: dict[str, str] = {
    "cannot import name 'amp' from 'apex'": _NO_AMP,
    "No module named 'apex.amp'": _NO_AMP,
    "No module named 'apex.parallel'": _NO_AMP,
    "No module named 'torch._six'": "An apex from before 2023-02-15 on torch 2.0 or newer, "
    "which removed torch._six: use NVIDIA/apex at tag 25.05 or conda-forge's `nvidia-apex` for "
    "your own training; syncbn-lab brings a stand-in for its experiments.",
    "cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'": "The "
    "installed apex is the Pyramid toolkit from PyPI, not NVIDIA's.",
}
"""Import errors that people report (apex #1063, #1804, #1902, #1930, #1991), and what each means.

Which apex is really there, and so the cure, is ``find_apex``'s to say.
"""

_IMPORTS_PYRAMID = re.compile(rb"^\s*(?:from|import)\s+pyramid", re.MULTILINE)
_PYRAMID_IN_METADATA = re.compile(r"^(?:Summary|Requires-Dist): *pyramid", re.M | re.I)


@dataclass(frozen=True)
class ApexInfo:
    """Which apex ``import apex`` would find, told without importing it."""

    status: str  # "usable", "absent", "pyramid", "without amp" (NVIDIA's since 2025-05-08), "other"
    distribution: str | None  # the installed package's name, not always "apex"
    version: str | None  # NVIDIA's says 0.1 for every one of its tags
    location: str | None  # the folder that holds apex/__init__.py
    has_amp: bool
    has_parallel: bool  # with the fallback, parallel/sync_batchnorm.py
    has_cuda_extension: bool  # syncbn, with which apex prefers its optimized class
    revision: str | None  # of sync_batchnorm.py; None if it is no known one
    commit: str | None  # of NVIDIA/apex that made this revision of the file
    sha256: str | None  # of sync_batchnorm.py
    kernel_sha256: str | None  # of sync_batchnorm_kernel.py
    kernel_known: bool  # whether that is the one file that all known revisions share
    cure: str | None  # one sentence that says what to do; None when usable

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain values, for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """One line for a person: what is there, where, and which revision it holds."""
        what = _WHAT[self.status]
        if self.status == "absent":
            return what + "."
        package = f" ({self.distribution} {self.version})" if self.distribution else ""
        line = f"{what}{package}, in {self.location}"
        if self.status != "usable":
            return line + "."
        line += ", with" if self.has_cuda_extension else ", without"
        line += " its CUDA extension; sync_batchnorm.py is "
        if self.revision is None:
            return (
                f"{line}of an unknown revision (sha256 {self.sha256}), so only "
                "revision='installed' runs."
            )
        return f"{line}{self.revision!r} of commit {(self.commit or '')[:8]}."


def find_apex(path: list[str] | None = None) -> ApexInfo:
    """Say which apex Python would import, from files and metadata; nothing is imported.

    Args:
        path: folders to search in place of ``sys.path``.

    """
    spec = _find("apex", path)
    if spec is None:
        return _info("absent")
    if spec.submodule_search_locations is None:  # a single file, apex.py
        return _info("other", location=spec.origin)
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    folder = folders[0] if folders else Path("apex")
    has_amp = (folder / "amp" / "__init__.py").is_file()
    fallback = _read(folder / "parallel" / "sync_batchnorm.py")
    kernel = _read(folder / "parallel" / "sync_batchnorm_kernel.py")
    package = _package(folder, path, "apex/amp/__init__.py" if has_amp else "apex/__init__.py")

    # The order matters: after `pip install apex` on top of NVIDIA's, files and metadata of both
    # lie in one folder, and __init__.py decides what an import does.
    if _IMPORTS_PYRAMID.search(_read(folder / "__init__.py") or b""):
        status = "pyramid"
    elif spec.origin is not None and has_amp and fallback is not None:
        status = "usable"
    elif package is not None and _PYRAMID_IN_METADATA.search(package.text):
        status = "pyramid"
    elif spec.origin is not None and (folder / "multi_tensor_apply").is_dir():
        status = "without amp"
    else:
        status = "other"
    revision = None if fallback is None else revisions.identify(fallback)
    return _info(
        status,
        distribution=None if package is None else package.name,
        version=None if package is None else package.version,
        location=str(folder),
        has_amp=has_amp,
        has_parallel=fallback is not None,
        has_cuda_extension=_is_compiled(_find("syncbn", path)),
        revision=None if revision is None else revision.name,
        commit=None if revision is None else revision.commit,
        sha256=_sha256(fallback),
        kernel_sha256=_sha256(kernel),
        kernel_known=_sha256(kernel) == revisions.KERNEL_SHA256,
    )


# By the path that was searched. Only what can be used is kept: whoever installs an apex in answer
# to the sentence below is believed at the next call. ``load`` checks the file's hash again.
_USABLE: dict[tuple[str, ...], ApexInfo] = {}


def require_apex(info: ApexInfo | None = None) -> ApexInfo:
    """Return ``info`` (by default of this environment) if its apex can be used.

    Raises:
        InputError: it can't; the sentence names what is there and ends in the cure.

    """
    if info is None:
        searched = tuple(sys.path)
        info = _USABLE.get(searched) or find_apex()
        if info.status == "usable":
            _USABLE[searched] = info
    if info.status != "usable":
        found, cure = info.sentence().removesuffix("."), info.cure or ""
        raise InputError(
            f"this needs NVIDIA's apex with amp and parallel, but {found}: "
            f"{cure[:1].lower()}{cure[1:]}"
        )
    return info


def source_of(revision: str) -> tuple[str, str] | None:
    """The file name and the text of ``sync_batchnorm.py`` at a revision, for ``loading.load``.

    None for "installed": the file is to be imported as it lies there.

    Raises:
        InputError: no usable apex, or a revision that can't be had from it.

    """
    info = require_apex()
    assert info.location is not None
    installed = Path(info.location) / "parallel" / "sync_batchnorm.py"
    content = revisions.rebuild(installed.read_bytes(), revision)
    if revision == "installed":
        return None
    commit = next(known.short_commit for known in revisions.KNOWN if known.name == revision)
    # Named so that it ends as in the report's tracebacks.
    return f"apex@{commit}/apex/parallel/sync_batchnorm.py", content.decode()


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Find the spec of top-level ``name`` as a fresh import would, imported already or not."""
    if path is not None:
        return importlib.machinery.PathFinder.find_spec(name, path)
    for finder in sys.meta_path:  # an editable install has a finder of its own here
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


@dataclass(frozen=True)
class _Package:
    """What an installed distribution says about itself."""

    name: str | None
    version: str | None
    text: str  # the whole of its metadata


def _package(folder: Path, path: list[str] | None, file: str) -> _Package | None:
    """Find the installed package that ``folder`` came from, if any says that it did."""
    claims = []
    search = sys.path if path is None else path
    for found in importlib.metadata.distributions(path=[str(entry) for entry in search]):
        # Read as text: a half-removed package, with no metadata left, must not stop the search.
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
        name, version = _field("Name", text), _field("Version", text)
        top_level = (found.read_text("top_level.txt") or "").split()
        if "apex" not in top_level and name not in ("apex", "nvidia-apex"):
            continue
        listed = {str(entry) for entry in found.files or ()}
        here = Path(str(found.locate_file("apex"))).resolve() == folder.resolve()
        # An editable install lists none of apex's files, and its folder is anywhere.
        if here or not any(entry.startswith("apex/") for entry in listed):
            claims.append((here and file in listed, _Package(name, version, text)))
    # Two packages may claim the folder: take the one that lists the file, else the first.
    return max(claims, key=lambda claim: claim[0])[1] if claims else None


def _field(name: str, metadata: str) -> str | None:
    match = re.search(rf"^{name}: *(\S+)", metadata, re.MULTILINE)
    return match and match[1]


def _info(status: str, **fields: Any) -> ApexInfo:
    empty: dict[str, Any] = dict.fromkeys(ApexInfo.__dataclass_fields__)
    empty.update(has_amp=False, has_parallel=False, has_cuda_extension=False, kernel_known=False)
    return ApexInfo(**{**empty, "status": status, "cure": _CURES.get(status), **fields})


def _is_compiled(spec: importlib.machinery.ModuleSpec | None) -> bool:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return spec is not None and spec.origin is not None and spec.origin.endswith(suffixes)


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()
