"""The real apex, imported into the child process of one experiment, at one revision."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple

from syncbn_lab.errors import InputError
from syncbn_lab.implementations import pair, stand_ins

_FALLBACK = "apex.parallel.sync_batchnorm"


class LoadedApex:
    """The real apex in this process, with one revision of its fallback."""

    def __init__(self, amp: ModuleType, parallel: ModuleType, fallback: ModuleType) -> None:
        self.amp = amp
        self.parallel = parallel
        self.SyncBatchNorm = fallback.SyncBatchNorm
        """The fallback class at that revision."""
        self.SyncBatchnormFunction = fallback.SyncBatchnormFunction
        """Its autograd Function."""
        self.files: Dict[str, str] = {
            "sync_batchnorm.py": str(fallback.__file__),
            "sync_batchnorm_kernel.py": str(
                sys.modules[fallback.SyncBatchnormFunction.__module__].__file__
            ),
        }
        """The file names that tracebacks show, by plain name."""
        self.stand_ins: List[str] = []
        """The names of those in force."""

    def convert_syncbn_model(self, model: Any, process_group: Any = None) -> Any:
        """``model`` through apex's own converter: batch norms become this ``SyncBatchNorm``."""
        return self.parallel.convert_syncbn_model(model, process_group=process_group)


def load(source: Optional[Tuple[str, str]], device: str, shift_pair: bool = False) -> LoadedApex:
    """Import the real apex, with this source of its fallback, for an experiment on ``device``.

    Only for the child process of one experiment: it installs stand-ins into torch, and
    ``amp.initialize`` patches torch's functions for the whole process. Throughout the process,
    ``apex.parallel.SyncBatchNorm`` and so apex's own ``convert_syncbn_model`` then mean the
    fallback at that revision, also where apex has its CUDA extension and would prefer its
    optimized class.

    Args:
        source: file name and text of ``sync_batchnorm.py``; None for the file as it lies there.
        device: as torch writes it; decides which stand-ins are used.
        shift_pair: whether (float, double) stands for (half, float); see ``pair``.

    Raises:
        InputError: no apex, or a package missing that apex imports.

    """
    names = stand_ins.install(device)
    if shift_pair:
        pair.install()
    loaded = LoadedApex(*_import(_RevisionLoader(*source) if source else None))
    loaded.stand_ins = names
    return loaded


def _import(
    loader: Optional["_RevisionLoader"],
) -> Tuple[ModuleType, ModuleType, ModuleType]:
    """apex.amp, apex.parallel and the fallback's module, the last one from ``loader`` if given."""
    # Out with a fallback that the user's model has imported, or an earlier load in this process.
    before = sys.modules.pop(_FALLBACK, None)
    finder = _RevisionFinder(loader)
    sys.meta_path.insert(0, finder)
    try:
        amp = importlib.import_module("apex.amp")
        parallel = importlib.import_module("apex.parallel")
        fallback = importlib.import_module(_FALLBACK)
    except ModuleNotFoundError as error:
        if error.name == "apex":
            raise InputError(f"no apex is installed in {sys.executable}.") from error
        if error.name not in ("numpy", "packaging", "tqdm"):  # all that apex needs beside torch
            raise _broken(error) from error
        raise InputError(
            f"apex imports {error.name}, which is not installed: `pip install {error.name}`."
        ) from error
    except Exception as error:
        raise _broken(error) from error
    finally:
        sys.meta_path.remove(finder)
    if not hasattr(fallback.SyncBatchNorm, "syncbn_import_error"):
        # apex.parallel notes on the class why it has no CUDA extension, when that is so and it
        # imports the class itself; the two oldest revisions fail where there is no such note.
        fallback.SyncBatchNorm.syncbn_import_error = getattr(
            getattr(before, "SyncBatchNorm", None),
            "syncbn_import_error",
            "none, the fallback was asked for",
        )
    parallel.__dict__["SyncBatchNorm"] = fallback.SyncBatchNorm
    return amp, parallel, fallback


def _broken(error: Exception) -> InputError:
    found = importlib.util.find_spec("apex")
    where = found.origin if found else "apex"
    return InputError(f"{where} can't be imported: {type(error).__name__}: {error}.")


class _RevisionLoader(importlib.abc.ExecutionLoader):
    """Compiles a rebuilt revision under a name of its own, and shows its source to tracebacks."""

    def __init__(self, filename: str, source: str) -> None:
        self._filename = filename
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._filename

    def get_source(self, fullname: str) -> str:
        return self._source

    def exec_module(self, module: ModuleType) -> None:
        # With None for a modification time, checkcache() doesn't look for a file and drop it.
        lines = self._source.splitlines(keepends=True)
        linecache.cache[self._filename] = (len(self._source), None, lines, self._filename)
        super().exec_module(module)


class _RevisionFinder(importlib.abc.MetaPathFinder):
    """Answers the import of apex's fallback with the rebuilt revision, and no other import."""

    def __init__(self, loader: Optional[_RevisionLoader]) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: Any, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != _FALLBACK or self._loader is None:
            return None
        filename = self._loader.get_filename(fullname)
        spec = importlib.machinery.ModuleSpec(fullname, self._loader, origin=filename)
        spec.has_location = True  # gives the module its __file__
        return spec
