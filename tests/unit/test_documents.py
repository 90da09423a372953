"""Documents name files, headings, commands, options, settings and make targets that exist."""

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.networks_page import page
from enginery.cli.commands import cli
from enginery.cluster.settings import settings_rows
from enginery.local.parameters import STEP_CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), *ROOT.glob("benchmarks/*.md")]


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = Path(os.path.normpath(page.parent / target)) if target else page
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not file.exists() or anchor not in {"", *anchors}:
            yield f"{target}#{anchor}"


@cache
def help_of(*arguments: str) -> str:
    return CliRunner().invoke(cli, [*arguments, "--help"]).output


def unknown_commands(text: str) -> Iterator[str]:
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            while words and "=" in words[0]:  # variables in front of the command
                words.pop(0)
            if words[:1] == ["make"]:
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                yield from (f"make {word}" for word in words[1:] if word.islower() and f"\n{word}:" not in makefile)
            elif words[:1] == ["enginery"]:
                known = help_of(words[1])
                # Whose options are the next word's.
                if words[1] in ("run", "submit", "compile", "data", "serve", "engines"):
                    known += help_of(*words[1:3]) + help_of("serve", "start")
                yield from (f"{words[1]} {w}" for w in words[2:] if w.startswith("--") and w.split("=")[0] not in known)


def unknown_settings(text: str) -> Iterator[str]:
    text = text.partition("\n## Names\n")[0]  # a record's table of old names
    of_clusters = {part for key, _, _ in settings_rows() for part in key.replace("[]", "").split(".")[1:]}
    for step, key in re.findall(rf"[`' ]({'|'.join(STEP_CONFIGS)})\.([a-z_0-9]+)", text):
        if key not in {*STEP_CONFIGS[step].model_fields, *of_clusters, "py", "yaml", "jsonl", "tsv"}:
            yield f"{step}.{key}"


def test_what_documents_name_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    problems = {
        str(page.relative_to(ROOT)): found
        for page, text in texts.items()
        if (found := [*broken_links(page, text), *unknown_commands(text), *unknown_settings(text)])
    }
    assert not problems


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_the_page_of_networks_is_of_the_result(machine: str) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{machine}/networks.json").read_text(encoding="utf-8"))
    assert (ROOT / f"docs/examples/{machine}/networks.md").read_text(encoding="utf-8") == page(result)
