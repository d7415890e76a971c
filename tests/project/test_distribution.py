"""What is installed and handed on: the source distribution, the wheel made of it, and what make installs."""

import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gradserve
from gradserve import protos
from tests.servers.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, sources: Path, output: Path, **variables: str) -> Path:
    """Builds a distribution with the backend that pyproject.toml names, in this environment."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", output, cwd=sources, env=os.environ | variables)
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run("tar", "-xf", build("sdist", ROOT, folder / "dist"), "-C", folder)
    return folder / f"gradserve-{gradserve.__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build("wheel", unpacked, folder / "dist")) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def files(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Returns the files in a folder with their digests."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_source_distribution_is_the_repository(unpacked: Path) -> None:
    """So whatever can be done in a checkout can be done with it: make test, the documentation, the image."""
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    expected = {name for name in tracked if (ROOT / name).is_file()}
    assert set(files(unpacked)) == expected | {"PKG-INFO"}


def test_the_wheel_is_the_packages_and_the_protos(wheel: Path) -> None:
    folders = {
        "gradserve": "client/gradserve",
        "gradserve_protocol": "client/gradserve_protocol",
        "gradserve_server": "server/gradserve_server",
        "gradserve_testing": "server/gradserve_testing",
        "gradserve_ray": "server/gradserve_ray",
        "gradserve_demo": "server/gradserve_demo",
        "gradserve/proto": "proto",
    }
    packages = {
        f"{installed}/{name}": digest
        for installed, folder in folders.items()
        for name, digest in files(ROOT / folder).items()
    }
    assert {name: digest for name, digest in files(wheel).items() if ".dist-info/" not in name} == packages


def test_the_version_is_said_once(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    assert f"\nVersion: {gradserve.__version__}\n" in metadata.read_text()
    assert importlib.metadata.version("gradserve") == gradserve.__version__


def test_a_plain_install_is_what_the_client_needs(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    plain = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert plain == {"googleapis-common-protos", "grpcio", "ml-dtypes", "numpy", "protobuf", "xxhash"}


def test_the_protos_are_where_it_says(wheel: Path) -> None:
    installed = run(
        sys.executable, "-m", "gradserve.protos", cwd=wheel, env={**os.environ, "PYTHONPATH": str(wheel)}
    ).strip()
    assert Path(installed) == wheel / "gradserve" / "proto"
    assert files(Path(installed)) == files(ROOT / "proto") == files(protos.folder())


def test_the_image_copies_all_that_the_wheel_is_made_of(wheel: Path, tmp_path: Path) -> None:
    context = tmp_path / "src"
    context.mkdir()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and not line.startswith("COPY --from"):
            *sources, target = shlex.split(line)[1:]
            for source in sources:
                assert f"!{source}" in ignored
                for path in ROOT.glob(source):
                    if path.is_dir():
                        shutil.copytree(path, context / target)
                    else:
                        shutil.copy(path, context / target)
    with zipfile.ZipFile(build("wheel", context, tmp_path / "dist")) as archive:
        assert set(archive.namelist()) == set(files(wheel))


def as_others_have_it(sources: Path, copy: Path) -> Path:
    """Copies sources to where files are the owner's alone, of another day, and listed in another order."""
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    for path in sorted(copy.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() or os.access(sources / path.relative_to(copy), os.X_OK) else 0o600)
        os.utime(path, (946_684_800, 946_684_800))
    return copy


@pytest.mark.exhaustive
def test_all_who_build_get_the_same_bits(unpacked: Path, tmp_path: Path) -> None:
    """In any folder, with any file times, umask, language, time zone and hashes of strings."""
    theirs = as_others_have_it(unpacked, tmp_path / "a folder of another name")
    here = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "1"}
    there = {"LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "HOME": str(tmp_path)}
    for target in ("sdist", "wheel"):
        ours = build(target, unpacked, tmp_path / "ours" / target, **here)
        before = os.umask(0o077)
        try:
            built = build(target, theirs, tmp_path / "theirs" / target, **there)
        finally:
            os.umask(before)
        assert (built.name, built.read_bytes() == ours.read_bytes()) == (ours.name, True)


@pytest.mark.exhaustive
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_checkout_and_the_source_distribution_of_it_make_the_same_bits(unpacked: Path, tmp_path: Path) -> None:
    for target in ("sdist", "wheel"):
        ours, theirs = (build(target, each, tmp_path / each.name / target) for each in (ROOT, unpacked))
        assert ours.read_bytes() == theirs.read_bytes()


def test_make_dist_ignores_the_time_that_the_environment_gives_to_files() -> None:
    (step,) = [line for line in run("make", "--dry-run", "dist").splitlines() if " -m build" in line]
    assert step.startswith("env -u SOURCE_DATE_EPOCH ")


@pytest.mark.parametrize(
    ("target", "extra"), [("serve", "server"), ("demo", "demo"), ("test", "dev"), ("lint", "dev"), ("types", "dev")]
)
def test_make_installs_what_the_target_needs(target: str, extra: str, tmp_path: Path) -> None:
    steps = run("make", "--dry-run", target, f"VENV={tmp_path}/venv")
    (install,) = [line for line in steps.splitlines() if " -e " in line]
    assert install.endswith(f"-e '.[{extra}]'")
    assert "--quiet" not in install
    assert f"into {tmp_path}/venv: about " in steps


@pytest.mark.parametrize(("first", "then"), [("install", "demo"), ("install", "serve"), ("demo", "serve")])
def test_make_installs_nothing_twice(first: str, then: str, tmp_path: Path) -> None:
    """The environment for development holds that of the demo, which holds the server's."""
    venv = tmp_path / "venv"
    venv.mkdir()
    for step in run("make", "--dry-run", first, f"VENV={venv}").splitlines():
        if step.startswith("touch "):
            run(*shlex.split(step))
    assert "pip install" not in run("make", "--dry-run", then, f"VENV={venv}")
