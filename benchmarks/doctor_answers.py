"""Whether two checkouts' doctors answer the same, byte for byte: output, errors and exit status of many requests.

A change of structure must not change an answer. Requests are drawn with a fixed seed from the cells' locks, from random
releases and ranges, from locks of every form that the doctor reads, with its options, and from what it refuses.

    python benchmarks/doctor_answers.py OLD_CHECKOUT NEW_CHECKOUT [--requests 600]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
VARIANTS = ("zero3-gather", "fsdp1-no_shard", "zero2-offload", "ddp-lora", "zero9")
TRAINERS = (
    "grpo",
    "ppo",
    "sft",
    "dpo",
    "reward",
    "rloo",
    "kto",
    "distillation",
    "orpo",
    "online-dpo",
    "trainer",
    "gold",
)
MARKERS = (
    "python_version < '3.11'",
    "sys_platform == 'linux'",
    "sys_platform != 'linux'",
    "platform_machine == 'x86_64' and python_version >= '3.10'",
    "extra == 'gpu'",
)
REFUSED: tuple[list[str], ...] = (
    ["trl"],
    ["trl=0.15.2"],
    ["trl==not-a-version"],
    ["trl==1!0.15.2"],
    ["tlr==0.15.2"],
    ["trl==0.15.2", "trl==0.16.0"],
    ["trl>2,<1"],
    ["no-such-file.txt"],
    ["numpy==1.0"],
    ["deepspeed==0.16.4"],
    ["trl==0.15.2", "--strategy", "zero9"],
    ["trl==0.15.2", "--trainer", "gold"],
    ["trl==1.16.0", "--trainer", "ppo"],
    ["trl==0.12.2", "transformers==4.52.4", "accelerate==1.5.2", "--strategy", "fsdp2"],
    ["trl==0.15.2", "--python", "three"],
    ["--help"],
    [],
    ["--json"],
)

Releases = dict[str, list[str]]


def requests(number: int, folder: Path) -> Iterator[dict[str, object]]:
    """Words of the command line, and what is on standard input."""
    chance = random.Random(7)
    releases = _releases()
    locks = sorted((ROOT / "fixtures" / "locks").glob("*.txt"))
    for words in REFUSED:
        yield {"words": words, "stdin": ""}
    for count in range(number - len(REFUSED)):
        stdin = ""
        kind = count % 6
        if kind == 0:
            lock = chance.choice(locks)
            words = chance.choice([[str(lock)], ["-r", str(lock)], ["-"]])
            stdin = lock.read_text(encoding="utf-8") if words == ["-"] else ""
            words = [*words, *([f"trl=={chance.choice(releases['trl'])}"] if chance.random() < 0.3 else [])]
        elif kind == 1:
            path = folder / f"{count}-{chance.choice(['uv.lock', 'pylock.toml', 'poetry.lock', 'Pipfile.lock'])}"
            path.write_text(_lock(path.name.partition("-")[2], chance, releases), encoding="utf-8")
            words = [str(path)]
        elif kind == 2:
            path = folder / f"{count}-requirements.txt"
            path.write_text("\n".join(_requirements(chance, releases)) + "\n", encoding="utf-8")
            words = ["-r", str(path)]
        else:
            words = _pins(chance, releases)
        yield {"words": [*words, *_options(chance)], "stdin": stdin}


def _releases() -> Releases:
    with open(ROOT / "fixtures" / "releases.toml", "rb") as file:
        document = tomllib.load(file)
    return {name: list(table) for name, table in document.items() if isinstance(table, dict)}


def _pins(chance: random.Random, releases: Releases) -> list[str]:
    words = []
    for package in releases:
        if package in ("trl", "transformers") or chance.random() < 0.6:
            version = chance.choice(releases[package])
            form = chance.random()
            if form < 0.7:
                words.append(f"{package}=={version}")
            elif form < 0.8:
                words.append(f"{package}>={version}")
            elif form < 0.9:
                words.append(f"{package}<={version}")
            else:
                words.append(f"{package}=={chance.choice([f'{version}.dev0', f'{version}+cu126', f'{version}rc1'])}")
    if chance.random() < 0.5:
        words.append(f"torch=={chance.choice(['2.4.1', '2.6.0+cu124', '2.13.0', '2.14.0'])}")
    if chance.random() < 0.2:
        words.append(chance.choice(["vllm==0.10.0", "liger-kernel==0.5.10", "pillow==11.0.0", "torchvision==0.21.0"]))
    return words


def _requirements(chance: random.Random, releases: Releases) -> list[str]:
    lines = []
    for pin in [*_pins(chance, releases), "numpy==2.0.0"]:
        lines.append(pin + (f" ; {chance.choice(MARKERS)}" if chance.random() < 0.25 else ""))
    if chance.random() < 0.2:
        lines.append("git+https://github.com/huggingface/peft@v0.14.0")
    if chance.random() < 0.1:
        lines.append("./wheels/unnamed")
    return lines


def _lock(name: str, chance: random.Random, releases: Releases) -> str:
    versions = {package: chance.sample(texts, min(2, len(texts))) for package, texts in releases.items()}
    forks = {package: texts if chance.random() < 0.3 else texts[:1] for package, texts in versions.items()}
    marker = chance.choice(MARKERS[:4])
    entries = [
        (package, text, "" if len(texts) == 1 else (marker if number == 0 else f"not_{number}"))
        for package, texts in forks.items()
        for number, text in enumerate(texts)
    ]
    opposite = {MARKERS[0]: "python_version >= '3.11'", MARKERS[1]: MARKERS[2], MARKERS[2]: MARKERS[1]}
    entries = [
        (package, text, opposite.get(marker, "platform_machine != 'x86_64'") if found.startswith("not_") else found)
        for package, text, found in entries
    ]
    if name == "Pipfile.lock":
        default = {package: {"version": f"=={text}", "markers": found} for package, text, found in entries}
        default = {package: {key: value for key, value in each.items() if value} for package, each in default.items()}
        return json.dumps({"_meta": {"hash": {"sha256": ""}}, "default": default, "develop": {}})
    heads = {
        "uv.lock": 'version = 1\nrequires-python = ">=3.10"\n',
        "pylock.toml": 'lock-version = "1.0"\nrequires-python = ">=3.10"\ncreated-by = "uv"\n',
        "poetry.lock": "",
    }
    table = "packages" if name == "pylock.toml" else "package"
    key = {"uv.lock": "resolution-markers", "pylock.toml": "marker", "poetry.lock": "markers"}[name]
    parts = [heads[name]]
    for package, text, found in entries:
        parts.append(f'[[{table}]]\nname = "{package}"\nversion = "{text}"\n')
        if found:
            parts.append(f'{key} = ["{found}"]\n' if name == "uv.lock" else f'{key} = "{found}"\n')
        if name == "poetry.lock":
            parts.append('optional = false\ngroups = ["main"]\n')
    if name == "poetry.lock":
        parts.append('[metadata]\nlock-version = "2.1"\npython-versions = ">=3.10"\n')
    return "".join(parts)


def _options(chance: random.Random) -> list[str]:
    words = []
    if chance.random() < 0.5:
        words.append("--json")
    if chance.random() < 0.4:
        words += ["--trainer", chance.choice(TRAINERS)]
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        words += ["--strategy", chance.choice(STRATEGIES if chance.random() < 0.8 else VARIANTS)]
    if chance.random() < 0.2:
        words += ["--python", chance.choice(["3.9", "3.10", "3.12", "3.14"])]
    if chance.random() < 0.2:
        words += ["--platform", chance.choice(["linux", "darwin", "win32"])]
    return words


def answer_all(asked: Sequence[dict[str, object]]) -> None:
    """In the process of one checkout: print a line for each request, with its status, output and errors."""
    from pytest_trlcompat import cli

    print_line = sys.stdout.write
    for request in asked:
        out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        sys.stdin = io.TextIOWrapper(io.BytesIO(str(request["stdin"]).encode()), encoding="utf-8")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status: object
            try:
                status = cli.main(["doctor", *request["words"]])  # type: ignore[misc]
            except SystemExit as ended:
                status = ended.code
            for stream in (out, errors):
                stream.flush()
        texts = [stream.buffer.getvalue().decode() for stream in (out, errors)]
        print_line(json.dumps([status, *texts]) + "\n")


def answers_of(checkout: Path, file: Path, folder: Path) -> list[list[object]]:
    """All answers of a checkout's doctor, from a process that imports it alone."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "120"}
    command = [sys.executable, str(Path(__file__).resolve()), "--answer", str(file)]
    printed = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.answer:
        answer_all(json.loads(Path(parsed.answer).read_text(encoding="utf-8")))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = list(requests(parsed.requests, folder))
        file = folder / "requests.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        old, new = (answers_of(checkout.resolve(), file, folder) for checkout in parsed.checkouts)
    differing = [number for number, (before, after) in enumerate(zip(old, new, strict=True)) if before != after]
    statuses = [answer[0] for answer in new]
    print(
        f"{len(asked) - len(differing)} of {len(asked)} answers are equal; status "
        + ", ".join(f"{status}: {statuses.count(status)}" for status in sorted(set(statuses), key=str))
    )
    for number in differing[:10]:
        print(f"differs: {asked[number]['words']}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
