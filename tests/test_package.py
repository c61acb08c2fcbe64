"""What a built wheel installs, as opposed to a checkout: both packages, their data, and imports without triton."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SOURCES = {"hf_replayssm": ROOT / "src/hf_replayssm", "replayssm_kernels": ROOT / "kernels/torch-ext/replayssm_kernels"}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout to build from")


def run(*command: object, **kwargs) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a build environment of its own, so that no network is needed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def run_installed(target: Path, code: str) -> str:
    """Runs `code` where both packages come from `target`: the checkout, editable or not, is out of sight."""
    checkout = [str(path.parent) for path in SOURCES.values()]
    prologue = f"""
        import sys
        sys.path[:] = [{str(target)!r}] + [path for path in sys.path if path not in {checkout!r}]
    """
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return run(sys.executable, "-c", textwrap.dedent(prologue) + textwrap.dedent(code), cwd=target, env=env)


def test_the_wheel_holds_every_source_and_nothing_else(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    for name in ("hf_replayssm/py.typed", "replayssm_kernels/py.typed", "replayssm_kernels/mamba2.py"):
        assert name in names
    assets = {Path(name).suffix for name in names if name.startswith("hf_replayssm/assets/")}
    assert {".safetensors", ".json", ".txt"} <= assets
    licences = {name.rsplit("/", 1)[1] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_both_packages_work_from_the_wheel(installed: Path):
    code = f"""
        import importlib.metadata
        from pathlib import Path

        import hf_replayssm
        import replayssm_kernels
        from hf_replayssm import bundled

        target = Path({str(installed)!r})
        for package in (hf_replayssm, replayssm_kernels):
            assert Path(package.__file__).is_relative_to(target), package.__file__
        assert bundled.heldout_path().is_relative_to(target) and bundled.heldout_path().stat().st_size > 1_000
        for load in (bundled.load_target, bundled.load_draft):
            model, tokenizer = load()
            assert model.num_parameters() > 0 and len(tokenizer) > 0

        (distribution,) = importlib.metadata.distributions(name="hf-replayssm", path=[str(target)])
        assert distribution.version == hf_replayssm.__version__
        (command,) = distribution.entry_points.select(group="console_scripts")
        assert command.name == "hf-replayssm" and callable(command.load())
        print("as installed")
    """
    assert "as installed" in run_installed(installed, code)


def test_replay_works_without_triton(installed: Path):
    code = """
        import sys
        sys.modules["triton"] = None  # any import of triton raises

        import replayssm_kernels

        assert not replayssm_kernels.is_available()
        assert "triton" in replayssm_kernels.unavailable_reason()

        import hf_replayssm
        from hf_replayssm import bundled

        model, tokenizer = bundled.load_target()
        inputs = tokenizer("The", return_tensors="pt")
        settings = dict(max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
        expected = model.generate(**inputs, **settings).sequences
        hf_replayssm.enable(model)
        output = model.generate(**inputs, **settings)
        assert output.sequences.tolist() == expected.tolist()
        assert isinstance(output.cache, hf_replayssm.ReplayCache)
        print("without triton")
    """
    assert "without triton" in run_installed(installed, code)


def test_the_kernels_have_the_layout_of_the_hub():
    """A Hub kernel is loaded from a path under a unique name, so nothing in it may import it by its own name."""
    assert not (ROOT / "kernels/__init__.py").exists()  # it would shadow the `kernels` package
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "kernels/build.toml").read_text())
    folder = ROOT / "kernels/torch-ext" / build["general"]["name"].replace("-", "_")
    code = f"""
        import importlib.util
        import sys

        sys.modules["replayssm_kernels"] = None
        spec = importlib.util.spec_from_file_location("_a_unique_name", {str(folder / "__init__.py")!r})
        kernels = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = kernels
        spec.loader.exec_module(kernels)
        print(kernels.is_available(), hasattr(kernels, "mamba2_decode"))
    """
    triton = importlib.util.find_spec("triton") is not None
    assert run(sys.executable, "-c", textwrap.dedent(code)).split() == [str(triton)] * 2
