"""One stack that known issues affect, written in every form that the doctor reads, with what hides or repeats it.

Each form says the same as the plain one, or less: a comment, a marker, a fork, an editable. So the answer may name
more issues, or be conditional, and never names fewer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from pytest_trlcompat.catalog.issue import KnownIssue

from .made_up import issue, predict

STACK = {
    "trl": "0.15.2",
    "transformers": "4.48.3",
    "torch": "2.6.0",
    "accelerate": "1.4.0",
    "deepspeed": "0.16.4",
    "peft": "0.14.0",
    "datasets": "3.3.2",
}
OTHERS = {
    "trl": "1.16.0",
    "transformers": "5.23.0",
    "torch": "2.13.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "datasets": "5.0.1",
}


def issues() -> list[KnownIssue]:
    """One for the version of each package, and one for all of them together: each lost version is seen."""
    every = {package: f"=={version}" for package, version in STACK.items()}
    alone = [
        issue(predict("broken", (), **{package: wanted}), predict("ok"), name=f"only-{package}", strategies=("single",))
        for package, wanted in every.items()
    ]
    return [*alone, issue(predict("silent", (), **every), predict("ok"), name="together", strategies=("single",))]


@dataclass(frozen=True)
class Written:
    """What the doctor is asked.

    Attributes:
        name: of the file, ``-`` for standard input.
        beside: other files, by name.
    """

    name: str
    data: bytes
    beside: Mapping[str, bytes] = field(default_factory=dict)


MARKERS = [
    ("python_version < '3.11'", "python_version >= '3.11'"),
    ('sys_platform == "linux"', 'sys_platform != "linux"'),
    ("platform_machine == 'x86_64'", "platform_machine != 'x86_64'"),
    ("extra == 'gpu'", "extra != 'gpu'"),
    ("python_full_version > '3.12.3' or os_name == 'nt'", "python_full_version <= '3.12.3' and os_name != 'nt'"),
    ("(((platform_system in 'Linux Darwin')))", "platform_system not in 'Linux Darwin'"),
    ("platform_release >= '20' and 'arm' in platform_machine", "platform_release < '20'"),
    ("python_version in '3.10 3.12'", "python_version not in '3.10 3.12'"),
    ("implementation_name == 'cpython' and '3.9' <= python_version", "implementation_name != 'cpython'"),
]
"""Pairs that exclude each other; no environment of the first lacks a Python that the doctor considers."""
_COMMENTS = st.sampled_from(
    [
        "# comment",
        "# trl==1.16.0",
        "# Editable install with no version control (mine==1.0)",
        "#",
        "# \x1b[2J\u202e",
        "    # via trl (transformers==5.23.0)",
    ]
)
_FILLERS = st.sampled_from(
    [
        "numpy==2.1.0",
        "rich",
        "aiohttp>=3 ; python_version < '3'",
        "mine @ file:///home/me/mine",
        "my.trl==2",
        "trl-x==3",
    ]
)
_HIDDEN = [
    "-e git+https://github.com/me/fork@v{version}#egg={name}",
    "-e ../{name}",
    "--editable=file:///home/me/{name}",
    "-e .",
    "-e file:///home/me/project",
    "git+https://github.com/me/other",
    "{name} @ git+https://github.com/me/other",
    "{name} @ https://u:pw@example.org/other-9.9-py3-none-any.whl",
    "./dist/{name}-{version}.tar.gz",
    "{name}-{version}-py3-none-any.whl",
    "https://github.com/huggingface/{name}/archive/refs/tags/v{version}.tar.gz",
    "https://github.com/huggingface/{name}/archive/main.zip",
    "https://example.org/latest.zip",
    "{name}[extra] @ git+https://github.com/huggingface/{name}@v{version}",
]
_PINNED = [
    "{name}=={version}",
    "{upper}=={version}",
    "{name} == {version}",
    "{name}==={version}",
    "{name}[a,b]=={version}",
    "{name}=={version}.0",
    "{name}=={version}+local.1",
    "{name}>={version},<={version}",
    "{name}=={version} --hash=sha256:0123 \\\n    --hash=sha256:4567",
    "{name}\\\n=={version}",
    "{name}=={version}  # the last that works",
    "{name}>=0",
    "{name}",
    "{name}!=0.1,!=0.2",
    "({name}=={version})",
]


def _shape(draw: st.DrawFn, text: str) -> bytes:
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return text.encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"])))


def _lines(draw: st.DrawFn, names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Lines that name each package, with markers that may hold, and lines that say nothing."""
    mine, other = draw(st.sampled_from(MARKERS))
    lines = []
    for name in names:
        line = draw(st.sampled_from(templates)).format(name=name, upper=name.upper(), version=STACK[name])
        if draw(st.integers(0, 3)) == 0 and not any(sign in line for sign in "#\\("):
            line += f" ; {mine}"
            if draw(st.booleans()) and name in line:
                lines.append(f"{name}=={OTHERS[name]} ; {other}")
        lines.append(line)
    return [*draw(st.permutations(lines)), *draw(st.lists(_FILLERS, max_size=3))]


def _commented(draw: st.DrawFn, lines: Sequence[str]) -> list[str]:
    found = []
    for line in lines:
        if draw(st.integers(0, 5)) == 0 and not line.startswith("-e"):
            found += [draw(_COMMENTS), draw(st.sampled_from(["", " ", "\t", "\x0c"]))]
        found.append(line)
    return found


@st.composite
def requirements(draw: st.DrawFn) -> Written:
    """A requirements file, a part of it in a file that it includes."""
    lines = _commented(draw, _lines(draw, list(STACK), [*_PINNED, *_PINNED, *_HIDDEN]))
    cut = draw(st.integers(0, len(lines)))
    option = draw(st.sampled_from(["-r more.txt", "-c sub/more.txt", "--requirement=more.txt", "-rmore.txt", ""]))
    if not option:
        return Written("req.txt", _shape(draw, "\n".join(lines)))
    head = "\n".join([*lines[:cut], *[option] * draw(st.integers(1, 3)), "", *draw(st.lists(_COMMENTS, max_size=2))])
    more = _shape(draw, "\n".join(lines[cut:]))
    return Written("req.txt", _shape(draw, head), {"more.txt": more, "sub/more.txt": more})


@st.composite
def freeze(draw: st.DrawFn) -> Written:
    """What ``pip freeze`` prints, or ``uv pip freeze``: complete, if nothing hides a name."""
    lines = _lines(draw, list(STACK), [_PINNED[0], _PINNED[0], _PINNED[5], _PINNED[6], *_HIDDEN])
    return Written("-", _shape(draw, "\n".join(_commented(draw, lines)) + "\n"))


@st.composite
def conda(draw: st.DrawFn) -> Written:
    """``conda list --export``, or ``conda env export``."""
    if draw(st.booleans()):
        lines = [f"{name}={version}=pypi_0" for name, version in STACK.items()]
    else:
        pins = [f"    - {name}=={version}" for name, version in STACK.items()]
        lines = ["name: gpu", "channels:", "  - defaults", "dependencies:", "  - python=3.11", "  - pip:", *pins]
    name = draw(st.sampled_from(["-", "req.txt"]))
    return Written(name, _shape(draw, "\n".join(_commented(draw, draw(st.permutations(lines))))))


Entry = dict[str, object]


def _entries(draw: st.DrawFn, own: Callable[[str, str], Entry], other: Callable[[str, str], Entry]) -> list[Entry]:
    """The stack's entries, perhaps with one marker, and beside some of them another version."""
    mine, excluded = draw(st.sampled_from(MARKERS))
    entries = []
    for name, version in STACK.items():
        marker = mine if draw(st.booleans()) else ""
        entries.append({"name": draw(st.sampled_from([name, name.upper()])), "version": version, **own(marker, name)})
        if draw(st.integers(0, 2)) == 0:
            beside = draw(st.sampled_from([excluded, mine, "python_version < '3'", ""]))
            entries.append({"name": name, "version": OTHERS[name], **other(beside, name)})
        if draw(st.integers(0, 6)) == 0:
            entries[-1 if entries[-1]["version"] == version else -2].pop("version")
    entries += [{"name": "numpy", "version": "2.1.0"}] * draw(st.integers(0, 2))
    return draw(st.permutations(entries))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _document(
    draw: st.DrawFn, name: str, head: Sequence[str], table: str, entries: Sequence[Entry], tail: str
) -> Written:
    lines = list(head)
    for entry in entries:
        lines += ["", f"[[{table}]]"]
        lines += [f"{key} = {_toml(value)}" for key, value in draw(st.permutations(list(entry.items())))]
    commented = [line for each in lines for line in ([draw(_SAFE), each] if draw(st.integers(0, 9)) == 0 else [each])]
    text = "\n".join([*commented, tail, ""])
    return Written(draw(st.sampled_from(["-", name])), _shape(draw, text))


_SAFE = st.sampled_from(["# comment", "# trl==1.16.0", "", "# {", "#[[package]]"])
_REQUIRES = st.sampled_from(['requires-python = ">=3.8"', 'requires-python = ">=3.9,<4"', "", 'requires-python = ""'])


@st.composite
def uv_lock(draw: st.DrawFn) -> Written:
    def own(marker: str, name: str) -> Entry:
        more: Entry = (
            {"resolution-markers": [marker, "python_version < '3'"][: draw(st.integers(1, 2))]} if marker else {}
        )
        if draw(st.booleans()):
            more["source"] = {"registry": "https://example.org/simple"}
        return more

    def other(marker: str, name: str) -> Entry:
        return {"resolution-markers": [marker]} if marker else {}

    project: Entry = {"name": "mine", "version": "1", "source": {"editable": "."}}
    project["dependencies"] = [
        {"name": name, **({"marker": "sys_platform == 'linux'"} if draw(st.booleans()) else {})}
        for name in draw(st.permutations(list(STACK)))
    ][: draw(st.integers(0, 7))]
    head = ["version = 1", "revision = 3", draw(_REQUIRES)]
    return _document(draw, "uv.lock", head, "package", [project, *_entries(draw, own, other)], "")


@st.composite
def pylock(draw: st.DrawFn) -> Written:
    def own(marker: str, name: str) -> Entry:
        return {"marker": marker} if marker else {}

    head = ['lock-version = "1.0"', 'created-by = "pip"', draw(_REQUIRES)]
    name = draw(st.sampled_from(["pylock.toml", "pylock.gpu.toml"]))
    return _document(draw, name, head, "packages", _entries(draw, own, own), "")


@st.composite
def poetry_lock(draw: st.DrawFn) -> Written:
    def own(marker: str, name: str) -> Entry:
        more: Entry = {"optional": draw(st.booleans())} if draw(st.booleans()) else {}
        more["groups"] = draw(st.sampled_from([["main"], ["dev"], ["main", "dev"]]))
        if marker:
            more["markers"] = draw(st.sampled_from([marker, {"main": marker, "dev": "python_version < '3'"}]))
        return more

    entries = _entries(draw, own, own)
    version = draw(st.sampled_from(["1.1", "2.0", "2.1"]))
    tail = f'[metadata]\nlock-version = "{version}"\npython-versions = ">=3.9"\n'
    return _document(
        draw, "poetry.lock", ["# This file is automatically @generated by Poetry"], "package", entries, tail
    )


@st.composite
def pipfile_lock(draw: st.DrawFn) -> Written:
    marker, _ = draw(st.sampled_from(MARKERS))
    tables: dict[str, dict[str, Entry]] = {"default": {}, "develop": {}}
    for name, version in draw(st.permutations(list(STACK.items()))):
        entry: Entry = draw(
            st.sampled_from(
                [
                    {"version": f"=={version}"},
                    {"version": f"=={version}"},
                    {"git": f"https://u:pw@example.org/{name}"},
                    {},
                ]
            )
        )
        entry = {**entry, "hashes": ["sha256:0123"], **({"markers": marker} if draw(st.booleans()) else {})}
        where = draw(st.sampled_from(["default", "develop", "both"])) if name != "trl" else "default"
        for table in ("default", "develop") if where == "both" else (where,):
            tables[table][draw(st.sampled_from([name, name.upper()]))] = entry
            if where == "both" and draw(st.booleans()):
                entry = {"version": f"=={OTHERS[name]}"}
    document = {"_meta": {"requires": {"python_version": "3.11"}}, **tables}
    text = json.dumps(document, indent=draw(st.sampled_from([None, 4])), ensure_ascii=draw(st.booleans()))
    return Written(draw(st.sampled_from(["-", "Pipfile.lock"])), _shape(draw, text))


FORMS: dict[str, Callable[[], st.SearchStrategy[Written]]] = {
    "requirements": requirements,
    "freeze": freeze,
    "conda": conda,
    "uv.lock": uv_lock,
    "pylock.toml": pylock,
    "poetry.lock": poetry_lock,
    "Pipfile.lock": pipfile_lock,
}


@st.composite
def damaged(draw: st.DrawFn, form: str) -> Written:
    """One of these with bytes lost, doubled or put in: what it says now nobody knows."""
    written = draw(FORMS[form]())
    data = bytearray(written.data)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 40)))
        new = draw(
            st.one_of(
                st.just(b""),
                st.just(bytes(data[begin:end]) * 2),
                st.binary(max_size=12),
                st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")),
                st.sampled_from(
                    [b"[", b"{", b"(" * 3000, b"1!", b"\x1b[31m", b"-r ", b"==", b";", b"\n", b"'''", b"= 5\n"]
                ),
                st.sampled_from(
                    [b"[" * 3000, b"a." * 200, b"9" * 5000, b"\\\n", b" and ", b"*", b"[[package]]\n", b"#egg="]
                ),
            )
        )
        data[begin:end] = new
    return Written(written.name, bytes(data), written.beside)
