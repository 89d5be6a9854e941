"""Which apex is installed, and the real one loaded at each revision.

Loading changes torch for a whole process, so every function called ``_in_child_…`` runs in a
child of its own, forked from one parent (this file run as a script) that has imported torch and
made no tensor.
"""

import ast
import importlib.machinery
import importlib.util
import inspect
import io
import json
import linecache
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import pytest

import syncbn_lab
from syncbn_lab.errors import InputError
from syncbn_lab.implementations import apex, revisions

REAL = importlib.util.find_spec("apex")
RECIPES = {  # opt_level and keep_batchnorm_fp32
    "O0": ("O0", None),
    "O1": ("O1", None),
    "O2": ("O2", None),
    "O2 keep=False": ("O2", False),
    "O3 keep=True": ("O3", True),
    "O3": ("O3", None),
}

# ---------------------------------------------------------------- what runs in the children


def _load(revision):
    """The installed apex with its fallback at a revision, as the child of a run has it."""
    source = apex.source_of(revision)
    from syncbn_lab.implementations import loading

    return loading.load(source, "cpu")


def _in_child_train(revision, recipe):
    """One step of Conv - BN - ReLU - Conv - BN: how it ended, and what the first BN layer gave."""
    import torch
    from torch import nn

    loaded = _load(revision)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    model = loaded.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opt_level, keep = RECIPES[recipe]
    model, optimizer = loaded.amp.initialize(
        model, optimizer, opt_level=opt_level, keep_batchnorm_fp32=keep, verbosity=0
    )
    dtypes, nodes = [], []

    def note(module, inputs, output):
        dtypes.append([str(inputs[0].dtype), str(getattr(output, "dtype", None))])
        nodes.append(type(getattr(output, "grad_fn", None)).__name__)

    model[1].register_forward_hook(note)
    try:
        output = model(torch.randn(4, 3, 16, 16))
        loss = output.float().pow(2).mean()
        with loaded.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        outcome = "ok"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return {
        "outcome": outcome,
        "dtypes": dtypes[0],
        "node": nodes[0],
        "classes": [type(model[n]) is loaded.SyncBatchNorm for n in (1, 4)],
    }


def _in_child_provenance(revision):
    """Fail inside the statement that the report names; what tracebacks and inspect show."""
    import torch

    loaded = _load(revision)
    layer = loaded.convert_syncbn_model(torch.nn.BatchNorm2d(8))
    layer.running_mean = torch.zeros(3)  # can't be added to 8 means: refused by that statement
    linecache.checkcache()  # as every printed traceback does: must not lose the source
    file = loaded.files["sync_batchnorm.py"]
    lines = [linecache.getline(file, n + 1) for n in range(200)]  # as a line tracer reads them
    shown = None
    try:
        layer(torch.randn(2, 8, 4, 4))
    except RuntimeError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        linecache.clearcache()  # then the loader has to give the source
        again = traceback.extract_tb(error.__traceback__)[-1]
        shown = [frame.filename, frame.lineno, frame.end_lineno, frame.line, again.line]
    return {
        "shown": shown,
        "lines": "".join(lines),
        "files": loaded.files,
        "source": "".join(linecache.getlines(file)),
        "getsource": inspect.getsource(loaded.SyncBatchNorm),
        "getsource of module": inspect.getsource(sys.modules["apex.parallel.sync_batchnorm"]),
        "code file": loaded.SyncBatchNorm.forward.__code__.co_filename,
        "node": loaded.SyncBatchnormFunction.__name__,
        "modules": [loaded.amp.__name__, loaded.parallel.__name__, loaded.SyncBatchNorm.__module__],
        "same class": loaded.parallel.SyncBatchNorm is loaded.SyncBatchNorm,
        "noted import error": str(getattr(loaded.SyncBatchNorm, "syncbn_import_error", None)),
        "meta path": any("syncbn_lab" in type(f).__module__ for f in sys.meta_path),
        "stand-ins": loaded.stand_ins,
    }


def _in_child_optimized(tmp_path):
    """Give apex its CUDA extension, a module called syncbn: still the fallback is used."""
    Path(tmp_path, "syncbn.py").write_text("")
    sys.path.insert(0, tmp_path)
    from syncbn_lab.implementations import stand_ins

    stand_ins.install("cpu")
    import apex.parallel as real
    import torch

    optimized = real.SyncBatchNorm
    _load("reported")
    layer = real.convert_syncbn_model(torch.nn.BatchNorm2d(3))
    return {
        "was optimized": optimized.__module__,
        "layer": type(layer).__module__,
        "code file": type(layer).forward.__code__.co_filename,
    }


def _in_child_loaded_before(tmp_path):
    """Load thrice after the user's model imported apex by itself: the last one holds."""
    from syncbn_lab.implementations import stand_ins

    stand_ins.install("cpu")
    import apex.parallel as real
    import torch

    noted = str(real.SyncBatchNorm.syncbn_import_error)
    files = []
    for revision in ("reported", "return-fixed", "installed"):
        loaded = _load(revision)
        layer = real.convert_syncbn_model(torch.nn.BatchNorm2d(3))
        assert str(loaded.SyncBatchNorm.syncbn_import_error) == noted
        files.append(type(layer).forward.__code__.co_filename)
    return files


def _in_child_refusals(tmp_path):
    """Errors that a user can cause, in their words."""
    said = {}
    for revision in ("newest", "deprecation-text"):
        try:
            _load(revision)
        except InputError as error:
            said[revision] = str(error)
    assert "torch._six" not in sys.modules  # refused before anything was changed
    sys.modules["tqdm"] = sys.modules["numpy"] = None  # as if they were not installed
    try:
        _load("reported")
    except InputError as error:
        said["missing"] = str(error)
    return said


def _quietly(function, *args):
    with redirect_stdout(io.StringIO()) as printed:
        return {"value": function(*args), "printed": printed.getvalue()}


def _main(out):
    """Run every child and write what they returned."""
    import torch
    import torch._dynamo  # the first optimizer imports it: once for all children

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = {}
    for revision in revisions.REVISION_NAMES:
        calls[f"provenance {revision}"] = (_in_child_provenance, revision)
        for recipe in RECIPES:
            calls[f"{revision} {recipe}"] = (_in_child_train, revision, recipe)
    calls["optimized"] = (_in_child_optimized, os.path.dirname(out))
    calls["loaded before"] = (_in_child_loaded_before, out)
    calls["refusals"] = (_in_child_refusals, out)
    with get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        waiting = {name: pool.apply_async(_quietly, call) for name, call in calls.items()}
        Path(out).write_text(json.dumps({name: w.get(60) for name, w in waiting.items()}))


# ---------------------------------------------------------------- loading the real apex


@pytest.fixture(scope="module")
def real():
    info = apex.find_apex()
    if info.status != "usable" or info.revision not in ("return-fixed", "deprecation-text"):
        pytest.skip(f"no apex of a known revision is installed: {info.sentence()}")
    return info


@pytest.fixture(scope="module")
def seen(real, tmp_path_factory):
    out = tmp_path_factory.mktemp("children") / "seen.json"
    root = str(Path(syncbn_lab.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, __file__, str(out)],
        env={**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


REFUSED = "RuntimeError: Input type (float) and bias type (c10::Half) should be the same"
NO_OUTPUT = "TypeError: relu(): argument 'input' (position 1) must be Tensor, not NoneType"
FLOAT, HALF = "torch.float32", "torch.float16"
# What the first batch norm layer takes and gives, and how the step ends, by torch's rules today.
WITH_OUTPUT = {
    "O0": (FLOAT, FLOAT, "ok"),
    "O1": (HALF, FLOAT, "ok"),
    "O2": (HALF, FLOAT, REFUSED),
    "O2 keep=False": (HALF, HALF, "ok"),
    "O3 keep=True": (HALF, FLOAT, REFUSED),
    "O3": (HALF, HALF, "ok"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("revision", revisions.REVISION_NAMES)
def test_what_each_revision_does_today(seen, revision, recipe):
    result = seen[f"{revision} {recipe}"]["value"]
    taken, given, outcome = WITH_OUTPUT[recipe]
    node = apex.DESCRIPTION.autograd_nodes[0]
    if revision == "cast-added":
        given, outcome, node = "None", NO_OUTPUT, "NoneType"
    assert (*result["dtypes"], result["outcome"]) == (taken, given, outcome)
    assert result["node"] == node
    assert result["classes"] == [True, True]


@pytest.mark.parametrize("revision", revisions.REVISION_NAMES[:3])
def test_tracebacks_name_the_statement_and_show_its_text(seen, revision):
    said = seen[f"provenance {revision}"]["value"]
    known = next(known for known in revisions.KNOWN if known.name == revision)
    filename = f"apex@{known.commit[:8]}/apex/parallel/sync_batchnorm.py"
    first, last = known.target_lines
    text = said["source"].splitlines()[first - 1].strip()
    assert said["shown"] == [filename, first, last, text, text]
    assert said["files"]["sync_batchnorm.py"] == said["code file"] == filename
    assert said["lines"] == said["source"]
    assert revisions.identify(said["source"].encode()) == known


def test_installed_is_the_file_as_it_is(seen, real):
    said = seen["provenance installed"]["value"]
    file = Path(real.location, "parallel", "sync_batchnorm.py")
    assert said["source"] == file.read_text()
    assert said["files"]["sync_batchnorm.py"] == said["code file"] == said["shown"][0] == str(file)


@pytest.mark.parametrize("revision", revisions.REVISION_NAMES)
def test_what_is_loaded(seen, real, revision):
    said = seen[f"provenance {revision}"]["value"]
    tree = ast.parse(said["source"])
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert said["getsource"].strip() == ast.get_source_segment(said["source"], cls)
    assert said["getsource of module"] == said["source"]
    kernel = Path(real.location, "parallel", "sync_batchnorm_kernel.py")
    assert said["files"]["sync_batchnorm_kernel.py"] == str(kernel)
    assert said["modules"] == ["apex.amp", "apex.parallel", "apex.parallel.sync_batchnorm"]
    assert said["node"] + "Backward" == apex.DESCRIPTION.autograd_nodes[0]
    assert said["same class"]
    assert not said["meta path"]  # the finder doesn't outlive the load
    assert len(said["stand-ins"]) in (4, 5)  # torch._six only where torch lacks it


def test_apex_itself_says_that_it_runs_its_fallback(seen, real):
    if real.has_cuda_extension:
        pytest.skip("apex has its CUDA extension here")
    result = seen["provenance reported"]
    assert "using Python fallback for SyncBatchNorm" in result["printed"]
    assert result["value"]["noted import error"] == "No module named 'syncbn'"


def test_the_fallback_is_used_where_apex_has_its_cuda_extension(seen):
    assert seen["optimized"]["value"] == {
        "was optimized": "apex.parallel.optimized_sync_batchnorm",
        "layer": "apex.parallel.sync_batchnorm",
        "code file": "apex@0a991543/apex/parallel/sync_batchnorm.py",
    }


def test_an_apex_that_was_imported_before_is_replaced(seen, real):
    assert seen["loaded before"]["value"] == [
        "apex@0a991543/apex/parallel/sync_batchnorm.py",
        "apex@574fe244/apex/parallel/sync_batchnorm.py",
        str(Path(real.location, "parallel", "sync_batchnorm.py")),
    ]


def test_refusals_are_one_clear_sentence(seen):
    said = seen["refusals"]["value"]
    assert "allowed are reported, cast-added, return-fixed, installed" in said["newest"]
    assert "allowed are" in said["deprecation-text"]
    assert said["missing"].startswith("apex imports ")
    assert "pip install" in said["missing"]


# ---------------------------------------------------------------- finding


def _tree(root, files, *packages):
    """Make a folder for ``sys.path``: files by name, and packages as (name, metadata, files)."""
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, metadata, listed in packages:
        folder = root / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(metadata)
        (folder / "top_level.txt").write_text("apex\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in listed))
    return [str(root)]


PYRAMID_FILES = {
    "apex/__init__.py": "import os\nfrom pyramid.settings import asbool\n",
    "apex/lib/libapex.py": "",
}
PYRAMID = (
    "apex-0.9.10.dev0",
    "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\nSummary: Pyramid toolkit to add "
    "Velruse\nRequires-Dist: velruse\nRequires-Dist: pyramid>1.1.2\n\nUses alchemy\n",
    list(PYRAMID_FILES),
)
NVIDIA_FILES = {"apex/__init__.py": "import torch\n", "apex/multi_tensor_apply/__init__.py": ""}
NVIDIA = ("apex-0.1", "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n\n", list(NVIDIA_FILES))
AMP_FILES = {
    **NVIDIA_FILES,
    "apex/amp/__init__.py": "",
    "apex/parallel/__init__.py": "",
    "apex/parallel/sync_batchnorm.py": "# a revision that nobody knows\n",
    "apex/parallel/sync_batchnorm_kernel.py": "# nor this\n",
}
AMP = ("apex-0.1", NVIDIA[1], list(AMP_FILES))


def test_absent(tmp_path):
    info = apex.find_apex([str(tmp_path)])
    assert (info.status, info.location, info.has_amp) == ("absent", None, False)
    assert "requirements-apex.txt" in info.cure
    assert info.sentence() == "no apex is installed."


def test_pyramid(tmp_path):
    info = apex.find_apex(_tree(tmp_path, PYRAMID_FILES, PYRAMID))
    assert info.status == "pyramid"
    assert (info.distribution, info.version) == ("apex", "0.9.10.dev0")
    assert info.location == str(tmp_path / "apex")
    assert "Pyramid" in info.sentence()


@pytest.mark.parametrize("files", [PYRAMID_FILES, {"apex/__init__.py": ""}])
@pytest.mark.parametrize("packages", [(), (PYRAMID,)])
def test_pyramid_is_told_by_its_files_or_its_metadata(tmp_path, files, packages):
    info = apex.find_apex(_tree(tmp_path, files, *packages))
    told = files is PYRAMID_FILES or packages
    assert info.status == ("pyramid" if told else "other")


def test_without_amp(tmp_path):
    info = apex.find_apex(_tree(tmp_path, NVIDIA_FILES, NVIDIA))
    assert info.status == "without amp"
    assert (info.has_amp, info.has_parallel, info.sha256) == (False, False, None)
    assert "2025-05-08" in info.cure
    assert "25.05" in info.cure
    assert "nvidia-apex" in info.cure


@pytest.mark.parametrize("lost", ["apex/amp/__init__.py", "apex/parallel/sync_batchnorm.py"])
def test_one_of_the_two_is_not_enough(tmp_path, lost):
    files = {name: text for name, text in AMP_FILES.items() if name != lost}
    assert apex.find_apex(_tree(tmp_path, files)).status == "without amp"


def test_an_unknown_revision_is_usable_as_it_is(tmp_path):
    info = apex.find_apex(_tree(tmp_path, AMP_FILES, AMP))
    assert info.status == "usable"
    assert (info.cure, info.revision, info.commit, info.kernel_known) == (None, None, None, False)
    assert (info.distribution, info.version, info.has_cuda_extension) == ("apex", "0.1", False)
    assert info.sha256 in info.sentence()
    assert "only revision='installed' runs" in info.sentence()
    assert apex.require_apex(info) is info


def test_the_cuda_extension_is_a_compiled_module(tmp_path):
    path = _tree(tmp_path, {**AMP_FILES, "syncbn.py": ""})
    assert not apex.find_apex(path).has_cuda_extension
    (tmp_path / "syncbn.py").unlink()
    (tmp_path / f"syncbn{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    importlib.invalidate_caches()
    assert apex.find_apex(path).has_cuda_extension


def test_both_packages_in_one_folder_go_by_what_an_import_would_do(tmp_path):
    # pip installs one over the other without a word; __init__.py is the last one's.
    path = _tree(tmp_path, AMP_FILES, PYRAMID, AMP)
    info = apex.find_apex(path)
    assert (info.status, info.version) == ("usable", "0.1")
    (tmp_path / "apex/__init__.py").write_text(PYRAMID_FILES["apex/__init__.py"])
    assert apex.find_apex(path).status == "pyramid"


def test_a_package_is_not_credited_with_another_folder(tmp_path):
    # A clone that PYTHONPATH puts before an installed apex: what the installed one says is not so.
    clone, site = tmp_path / "clone", tmp_path / "site"
    path = [*_tree(clone, AMP_FILES), *_tree(site, PYRAMID_FILES, PYRAMID)]
    info = apex.find_apex(path)
    assert (info.status, info.location) == ("usable", str(clone / "apex"))
    assert (info.distribution, info.version) == (None, None)


def test_an_editable_install_keeps_its_name(tmp_path):
    clone, site = tmp_path / "clone", tmp_path / "site"
    editable = (*NVIDIA[:2], ["__editable___apex_0_1_finder.py", "apex-0.1.dist-info/RECORD"])
    info = apex.find_apex([*_tree(clone, AMP_FILES), *_tree(site, {}, editable)])
    assert (info.distribution, info.version) == ("apex", "0.1")


def test_a_plain_folder_called_apex(tmp_path):
    # A clone of the repository beside the script: Python takes the folder for a package.
    info = apex.find_apex(_tree(tmp_path, {"apex/setup.py": "", "apex/apex/__init__.py": ""}))
    assert (info.status, info.location) == ("other", str(tmp_path / "apex"))
    assert "start Python from another folder" in info.cure


def test_a_single_file_called_apex(tmp_path):
    info = apex.find_apex(_tree(tmp_path, {"apex.py": ""}))
    assert (info.status, info.location) == ("other", str(tmp_path / "apex.py"))


def test_a_package_without_metadata_does_not_stop_the_search(tmp_path):
    (tmp_path / "half_removed-1.0.dist-info").mkdir()
    assert apex.find_apex(_tree(tmp_path, NVIDIA_FILES, NVIDIA)).version == "0.1"


@pytest.mark.parametrize(
    ("files", "packages", "words"),
    [
        ({}, (), ["no apex is installed"]),
        (PYRAMID_FILES, (PYRAMID,), ["Pyramid", "`pip uninstall apex`"]),
        (NVIDIA_FILES, (NVIDIA,), ["without amp or parallel", "`pip uninstall apex`"]),
        ({"apex.py": ""}, (), ["neither NVIDIA's nor the Pyramid toolkit"]),
    ],
)
def test_require_ends_in_the_cure(tmp_path, files, packages, words):
    info = apex.find_apex(_tree(tmp_path, files, *packages))
    with pytest.raises(InputError) as caught:
        apex.require_apex(info)
    message = str(caught.value)
    cures = ["--require-hashes -r requirements-apex.txt", "nvidia-apex", "25.05"]
    assert [word for word in [*words, *cures] if word not in message] == []
    assert "\n" not in message
    assert message.count(". ") == 0  # one sentence


def test_reported_import_errors_are_explained():
    assert (
        "Pyramid"
        in apex.SYMPTOMS[
            "cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'"
        ]
    )
    for message in ("cannot import name 'amp' from 'apex'", "No module named 'apex.parallel'"):
        assert "2025-05-08" in apex.SYMPTOMS[message]
    assert "25.05" in apex.SYMPTOMS["No module named 'torch._six'"]


def test_the_real_one(real):
    assert (real.has_amp, real.has_parallel, real.kernel_known) == (True, True, True)
    assert real.kernel_sha256 == revisions.KERNEL_SHA256
    assert real.location == str(Path(REAL.origin).parent)
    assert real.distribution is not None
    assert real.revision in real.sentence()
    assert real.commit[:8] in real.sentence()
    assert json.loads(json.dumps(real.as_dict()))["sha256"] == real.sha256
    assert apex.require_apex() == real


def test_finding_imports_neither_torch_nor_apex():
    code = (
        "import sys; from syncbn_lab.implementations import apex; apex.find_apex();"
        "print([name for name in ('torch', 'apex') if name in sys.modules])"
    )
    root = Path(syncbn_lab.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


if __name__ == "__main__":
    _main(sys.argv[1])
