"""House rules that a reader would otherwise have to watch: sizes, docstrings, leftovers, versions, paths."""

import ast
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from tangram.version import __version__

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "tangram").rglob("*.py"))
INITS = [path for path in MODULES if path.name == "__init__.py"]
LINES_MAX = 500
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX)\b")
PRIVATE_PATHS = re.compile(r"(?<![\w.~$}-])/(?:work|home|root)/[\w.-]+")
PUBLIC_PATHS = {"/home/user", "/home/sandbox"}
"""Made-up paths that examples may use."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_fits_into_a_readers_head(path: Path) -> None:
    count = len(path.read_text(encoding="utf-8").splitlines())
    assert count <= LINES_MAX, f"{name(path)} has {count} lines, at most {LINES_MAX}: take a part out of it"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name.strip("_") == path.name or path in INITS], ids=name)
def test_a_public_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body, f"{name(path)} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_is_left_for_later(path: Path) -> None:
    with path.open("rb") as source:
        found = [
            f"{name(path)}:{token.start[0]}: {token.line.strip()[:100]}"
            for token in tokenize.tokenize(source.readline)
            if LEFTOVERS.search(token.string) or (token.type == tokenize.NAME and token.string == "NotImplementedError")
        ]
    assert not found, "\n".join(found)


def is_allowed_in_init(node: ast.stmt) -> bool:
    """Imports, names for them, and names that are loaded when they are first used (PEP 562)."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return all(isinstance(part, ast.Import | ast.ImportFrom) for part in [*node.body, *node.orelse])
        case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
            return not any(isinstance(part, ast.Call) for part in ast.walk(node))
        case ast.FunctionDef(name="__getattr__" | "__dir__"):
            return True
    return False


@pytest.mark.parametrize("path", INITS, ids=name)
def test_an_init_only_re_exports(path: Path) -> None:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    wrong = [f"{name(path)}:{node.lineno}: {type(node).__name__}" for node in nodes if not is_allowed_in_init(node)]
    assert not wrong, "put this into a module of its own:\n" + "\n".join(wrong)


def test_the_changelog_ends_with_this_version() -> None:
    path = ROOT / "CHANGELOG.md"
    if path.exists():
        headings = re.findall(r"^## +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        released = [heading for heading in headings if "unreleased" not in heading.lower()]
        assert released, "CHANGELOG.md has no heading of a version"
        found = re.match(r"\[?v?([0-9][^\]\s]*)", released[0])
        assert found, f"{released[0]!r} names no version"
        assert found[1] == __version__, "the newest heading of CHANGELOG.md and tangram/version.py differ"


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?(\.dev[0-9]+)?", __version__)


def text_files() -> list[Path]:
    """What git tracks or would track; without git (a source package), what is here."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        paths = [ROOT / line for line in listed.split("\0") if line]
    else:
        folders = ["tangram", "tests", "docs", "examples", "streams", "deploy"]
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in files if b"\0" not in path.read_bytes()[:8_000])


def test_no_path_of_a_developers_machine() -> None:
    found: list[str] = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            wrong = [match for match in PRIVATE_PATHS.findall(line) if match not in PUBLIC_PATHS]
            found += [f"{name(path)}:{number}: {match}" for match in wrong if path != Path(__file__)]
    assert not found, "\n".join(found)


def test_private_paths_are_recognized() -> None:
    for line in ("cd /work/x", '"/home/alice/x"', "=/root/.cache"):
        assert PRIVATE_PATHS.search(line)
    for line in ("a/work/b", "./home/x", "$HOME/root/x", "/workspace/x", "/root/ is a folder"):
        assert not PRIVATE_PATHS.search(line)
