"""What is shipped fits what is written about it."""

import ast
import importlib.metadata
import re
import tomllib

import pytest

import diffprune
from diffprune.extras import EXTRAS, VERSIONS
from diffprune.versions import NEEDED
from tools import check_imports


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0]


def test_the_version_is_the_same_everywhere(project, root):
    assert diffprune.__version__ == project["project"]["version"] == importlib.metadata.version("diffprune")
    assert f"## {diffprune.__version__}" in (root / "CHANGELOG.md").read_text()


def test_the_core_needs_only_what_the_import_check_allows(project):
    modules = {"pillow": "PIL", "pyyaml": "yaml"}
    needed = {name_of(requirement) for requirement in project["project"]["dependencies"]}
    assert {modules.get(name, name) for name in needed} == check_imports.CORE


def test_doctor_asks_for_the_versions_the_package_asks_for(project):
    wanted = {f"{name}>={'.'.join(map(str, version))}" for name, version in NEEDED.items()}
    assert wanted <= set(project["project"]["dependencies"])


def test_the_extras_are_those_of_the_package(project):
    optional = project["project"]["optional-dependencies"]
    assert set(EXTRAS) <= set(optional) - {"dev"}  # an engine's own may come before what uses it
    for name, extra in EXTRAS.items():
        assert {name_of(requirement).replace("-", "_") for requirement in optional[name]} == set(extra.modules)
        asked = {module.replace("_", "-") + VERSIONS.get(module, "") for module in extra.modules}
        assert asked == set(optional[name])  # what doctor says to install is what was tested


def test_every_public_name_can_be_had():
    for name in diffprune.__all__:
        assert getattr(diffprune, name) is not None
    assert "full" in diffprune.methods() and "llava" in diffprune.backbones()


def test_imports_point_one_way(root):
    assert check_imports.check(root / "src/diffprune") == []
    assert check_imports.check(root / "lab/diffprune_lab") == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ops/a.py", "import numpy", "ops imports only jaxtyping, torch, not numpy"),
        ("ops/a.py", "def f():\n    from diffprune import nn", "ops may not import nn"),
        ("nn/a.py", "from diffprune.methods.base import Pruner", "nn may not import methods"),
        ("methods/a.py", "import diffprune.model", "methods may not import model"),
        ("inside/state.py", "from diffprune.methods import base", "inside may not import methods"),
        ("model.py", "from diffprune.cli import print_json", "model may not import cli"),
        ("model.py", "def f():\n    import diffprune_lab", "the library may not import diffprune_lab"),
        ("newcomer.py", "import torch", "part 'newcomer' of diffprune has no line"),
        ("train/a.py", "import datasets", "datasets is not in the core"),
        ("nn/a.py", "from . import blocks", "relative import"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(tmp_path, file, text, message):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (found,) = check_imports.check(tmp_path)
    assert message in found


def test_modules_that_import_each_other_are_found_even_inside_functions(tmp_path):
    folder = tmp_path / "diffprune"
    (folder / "ops").mkdir(parents=True)
    (folder / "ops" / "a.py").write_text("def f():\n    from diffprune.ops.b import g\n    return g")
    (folder / "ops" / "b.py").write_text("from diffprune.ops import a\n")
    (found,) = check_imports.check(folder)
    assert found == "diffprune: these import each other: diffprune.ops.a, diffprune.ops.b"


def test_an_extra_imported_where_it_is_used_is_fine(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data.py").write_text("def load():\n    import datasets\n    return datasets\n")
    assert check_imports.check(tmp_path) == []


def test_committed_weights_stay_small_and_in_the_lab(root):
    assert list((root / "src").rglob("*.safetensors")) == []
    sizes = [path.stat().st_size for path in (root / "lab/diffprune_lab").rglob("*.safetensors")]
    assert sum(sizes) <= 60e6 and all(size < 16 * 2**20 for size in sizes)


def test_a_source_file_is_about_one_thing(root):
    lengths = {
        path.relative_to(root): len(path.read_text().splitlines())
        for folder in ("src/diffprune", "lab/diffprune_lab", "tools", "examples")
        for path in (root / folder).rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > 400} == {}
    assert len((root / "src/diffprune/model.py").read_text().splitlines()) <= 300


def test_the_public_names_are_those_a_user_needs():
    import diffprune as dp

    wanted = {"load", "PrunedVLM", "Selection", "Budget", "train", "Config", "Pruner", "register", "methods"}
    assert wanted | {"backbones", "ops"} <= set(dir(dp))
    for name in dir(dp):
        assert getattr(dp, name) is not None
    assert callable(dp.train) and callable(dp.methods) and callable(dp.backbones)


def test_nothing_is_pickled_and_no_lock_lies_outside_the_run(root):
    """Tensors go into safetensors files; a lock lies beside what it guards, not in a folder of the whole machine."""
    for path in [*(root / "src").rglob("*.py"), *(root / "lab/diffprune_lab").rglob("*.py")]:
        text = path.read_text()
        found = re.search(r"(?<!safetensors\.)\btorch\.(save|load)\(|\bpickle\.\w|gettempdir", text)
        assert found is None, f"{path}: {found}"


def test_whatever_is_loaded_by_name_says_that_no_code_is_run(root):
    """transformers' auto classes ask on standard input where nothing is said, and `yes |` would run a folder's code."""
    for path in [*(root / "src").rglob("*.py"), *(root / "lab/diffprune_lab").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".from_pretrained"):
                continue
            if ast.unparse(node.func).startswith(("Auto", "kind.")):
                said = [ast.unparse(word) for word in node.keywords]
                assert "trust_remote_code=False" in said, f"{path}:{node.lineno}"


def test_every_extra_that_is_asked_for_is_known(root):
    text = "\n".join(path.read_text() for path in (root / "src/diffprune").rglob("*.py"))
    assert set(re.findall(r'\brequire\("(\w+)"\)', text)) <= set(EXTRAS)
