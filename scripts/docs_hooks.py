"""Pages of the documentation site that are made from the rest of the repository; mkdocs calls the functions named on_*.

Made: the examples' READMEs, HACKING, CONTRIBUTING and CHANGELOG, an index of the decisions, a page for each public header, the
capability table (asked of the program, RINGSPAN_PROGRAM), and a page for each other file or folder that a page links to. Links that lead
out of docs/ in the repository are rewritten to these pages, so that one text serves in the repository and on the site; a link to
nothing is left as it is, for mkdocs to reject.
"""

import json
import os
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
PICTURE = re.compile(r"^!\[([^\]]*)\]\((\S+\.svg)\)$", re.MULTILINE)
LINK_OR_CODE = re.compile(f"{LINK.pattern}|`[^`]+`")
FENCE = re.compile(r"^ {0,3}(```|~~~)")
LANGUAGES = {".h": "cpp", ".cc": "cpp", ".c": "c", ".py": "python", ".yml": "yaml", ".toml": "toml", ".txt": "text"}
DATA = (".json", ".png", ".svg", ".safetensors")
ABOUT_PROJECT = ("HACKING.md", "CONTRIBUTING.md", "CHANGELOG.md")
C_HEADER = "ringspan_c.h"

_origins = {}  # page of the site: the file of the repository that its links are relative to
_pages = {}  # file of the repository: page of the site


def _code(text, language):
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _comment(text):
    """The comment that a header opens with, without its marks."""
    block = re.match(r"\s*/\*(.*?)\*/", text, re.DOTALL)
    if block:
        return [re.sub(r"^\s*\*? ?", "", line) for line in block[1].strip().splitlines()]
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].removeprefix(" "))
    return lines


def _prose(lines):
    """A header's opening comment as Markdown: what is indented is code."""
    out, code = [], []
    for line in [*lines, ""]:
        if line.startswith("  ") or (code and not line):
            code.append(line)
            continue
        if code:
            out += ["", _code("\n".join(line[2:] for line in code), "cpp")]
            code = []
        out.append(line)
    return "\n".join(out)


def _role(text):
    """The first sentence of a header's comment."""
    first = " ".join(line.strip() for line in _comment(text)).split(". ")[0].rstrip(".:")
    return re.split(r":\s{2,}", first)[0]


def _header_page(path):
    """The contract as text, then the declarations, over the whole width."""
    text = path.read_text()
    comment = _comment(text)
    declarations = text.split("*/", 1)[1] if text.lstrip().startswith("/*") else "\n".join(text.splitlines()[len(comment) :])
    title = f"# {path.name}\n\n`#include <ringspan/{path.name}>`\n\n"
    return "---\nhide: [toc]\n---\n\n" + title + _prose(comment) + "\n\n" + _code(declarations.strip(), "c" if path.name == C_HEADER else "cpp")


def _headers():
    return sorted(path for path in (ROOT / "include/ringspan").glob("*.h"))


def _cpp_index():
    lines = [
        "# C++",
        "",
        "The public headers, each with its contract. Embedders include `<ringspan/ringspan.h>`, which has them all, link `ringspan::ringspan`, and see no type of a dependency.",
        "",
        "| header | |",
        "| --- | --- |",
    ]
    for path in _headers():
        if path.name != C_HEADER:
            lines.append(f"| [{path.name}](headers/{path.stem}.md) | {_role(path.read_text())} |")
    return "\n".join(lines) + "\n\nIn C: [ringspan_c.h](c.md). A first program: [examples/06_cpp](../../examples/06_cpp).\n"


def _c_page():
    first = "A first program: [examples/07_c](../../examples/07_c).\n\n"
    page = _header_page(ROOT / "include/ringspan" / C_HEADER)
    page = re.sub(r"\n*^/\* -+ (.*?) -+ \*/\n+", r"\n```\n\n## \1\n\n```c\n", page, flags=re.MULTILINE)
    return page.replace(f"# {C_HEADER}\n\n", f"# C\n\nOne header, C11, no type of C++ in it. {first}", 1)


def _decisions():
    lines = ["# Decisions", "", "What was decided against the obvious, and why. Each record has its alternatives and what they cost.", ""]
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        if not path.name.startswith("0000"):
            title = path.read_text().splitlines()[0].lstrip("# ")
            lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def _examples():
    lines = ["# Examples", "", "Each is a folder of the repository and is run by the tests.", "", "| | |", "| --- | --- |"]
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        title, *rest = readme.read_text().splitlines()
        sentences = next(line for line in rest if line.strip() and not line.startswith(("    ", "!", "#", "|")))
        about = re.split(r"(?<=[.:]) ", re.sub(LINK, lambda m: m[1][1:-1], sentences))[0].rstrip(":.")
        lines.append(f"| [{readme.parent.name}]({readme.parent.name}.md) | {title.lstrip('# ')}: {about} |")
    return "\n".join(lines) + "\n"


def _capabilities():
    program = os.environ.get("RINGSPAN_PROGRAM", "")
    if not os.access(program, os.X_OK):
        raise PluginError(f"RINGSPAN_PROGRAM ({program!r}) is not the program; build it first: make build")
    table = json.loads(subprocess.run([program, "capabilities", "--json"], check=True, capture_output=True, text=True).stdout)
    strategies = list(dict.fromkeys(cell["strategy"] for cell in table["cells"]))
    reasons, rows = [], {}
    for cell in table["cells"]:
        row = rows.setdefault((cell["pattern"], cell["option"]), {}).setdefault(cell["strategy"], {})
        row[cell["dtype"], cell["pass"]] = cell.get("reason", "")

    def mark(cells):
        found = sorted(set(cells.values()))
        if found == [""]:
            return "yes"
        for reason in found:
            if reason and reason not in reasons:
                reasons.append(reason)
        numbers = ", ".join(str(reasons.index(reason) + 1) for reason in found if reason)
        refused = {name for (_, name), reason in cells.items() if reason}
        if sum(bool(reason) for reason in cells.values()) == len(cells):
            return f"no ({numbers})"
        if all(reason for (_, name), reason in cells.items() if name in refused) and len(refused) == 1:
            return f"{'forward' if 'backward' in refused else 'backward'} only ({numbers})"
        return f"not {', '.join(' '.join(which) for which, reason in cells.items() if reason)} ({numbers})"

    lines = [
        "# Capabilities",
        "",
        "What works with what: made when this site was built, by `ringspan capabilities`, which plans a small problem for every cell. So the code that refuses is asked,",
        "and nothing is written down twice. A yes holds for float32, bfloat16 and float16, forward and backward.",
    ]
    heading = ["", "| | " + " | ".join(strategies) + " |", "| --- " * (len(strategies) + 1) + "|"]
    patterns, options = (list(dict.fromkeys(key[k] for key in rows)) for k in (0, 1))
    marks = {key: [mark(cells[strategy]) for strategy in strategies] for key, cells in rows.items()}

    def line(name, found):
        return f"| {name} | " + " | ".join(found) + " |"

    lines += ["", "## Patterns", *heading, *(line(pattern, marks[pattern, options[0]]) for pattern in patterns)]
    lines += ["", "## With any of these patterns", *heading]
    for option in options[1:]:
        common = marks[patterns[0], option]
        lines.append(line(option, common))
        lines += [line(f"… and {pattern}", marks[pattern, option]) for pattern in patterns if marks[pattern, option] != common]
    lines += ["", "## Why not", ""] + [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    lines += ["", "## Kernels", "", "Best first; the first that supports a shape on the machine at hand is taken, unless one is named.", ""]
    for name, kernels in table["kernels"].items():
        lines.append(f"- {name}: " + ", ".join(f"`{kernel}`" for kernel in kernels))
    return "\n".join(lines) + "\n"


def _made_pages():
    """(page of the site, its text, file of the repository that it stands for and that its links are relative to)."""
    yield "examples/index.md", _examples(), "docs/examples/index.md"
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        text = readme.read_text()
        for name in sorted(path.name for path in readme.parent.iterdir() if path.suffix in (".py", ".cc", ".c") and readme.parent.name[0] in "0123456789"):
            text += f"\n## {name}\n\n" + _code((readme.parent / name).read_text(), LANGUAGES[Path(name).suffix])
        yield f"examples/{readme.parent.name}.md", text, f"examples/{readme.parent.name}/README.md"
    for name in ABOUT_PROJECT:
        yield f"project/{name}", (ROOT / name).read_text(), name
    yield "decisions/index.md", _decisions(), "docs/decisions/index.md"
    yield "reference/cpp.md", _cpp_index(), "docs/reference/cpp.md"
    yield "reference/c.md", _c_page(), "docs/reference/c.md"
    for path in _headers():
        if path.name != C_HEADER:
            yield f"reference/headers/{path.stem}.md", _header_page(path), f"include/ringspan/{path.name}"
    yield "reference/capabilities.md", _capabilities(), "docs/reference/capabilities.md"


def _change_links(text, change):
    """Replaces each link by change(match of LINK), but for those in a code block or in `code`; the text of a link may have `code`."""
    lines, fence = [], None
    for line in text.splitlines():
        mark = FENCE.match(line)
        if mark and fence in (None, mark[1]):
            fence = None if fence else mark[1]
            lines.append(line)
        elif fence or line.startswith("    "):
            lines.append(line)
        else:
            lines.append(LINK_OR_CODE.sub(lambda match: match[0] if match[0].startswith("`") else change(match), line))
    return "\n".join(lines) + "\n"


def _target(origin, link):
    """The file of the repository that a link names, and its anchor; None where it is not such a link."""
    if re.match(r"[a-z]+:|#|/", link):
        return None
    name, _, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), name)), anchor


def _page_of(target):
    if target in _pages:
        return _pages[target]
    for index in ("README.md", "index.md"):
        if f"{target}/{index}" in _pages:
            return _pages[f"{target}/{index}"]
    return None


def _links(text, origin):
    found = []

    def note(match):
        target = _target(origin, match[2])
        if target:
            found.append(target[0])
        return match[0]

    _change_links(text, note)
    return found


def _add_linked(target, files, config):
    """A file or folder outside docs/ to which a page links: source as a page, data and pictures as they are, a folder as a list."""
    path = ROOT / target
    if path.suffix in DATA:
        _pages[target] = f"source/{target}"
        files.append(File.generated(config, _pages[target], content=path.read_bytes()))
        return
    if path.is_dir():
        text = f"# {target}\n\n" + "".join(f"- `{entry.name}{'/' if entry.is_dir() else ''}`\n" for entry in sorted(path.iterdir()))
    else:
        text = f"# {target}\n\n" + _code(path.read_text(), LANGUAGES.get(path.suffix, "text"))
    _pages[target] = f"source/{target}.md"
    _origins[_pages[target]] = target
    files.append(File.generated(config, _pages[target], content=text))


def on_files(files, config):
    _origins.clear()
    _pages.clear()
    texts = {}
    for file in files.documentation_pages():
        _origins[file.src_uri] = f"docs/{file.src_uri}"
        texts[file.src_uri] = Path(file.abs_src_path).read_text()
    _pages.update({origin: page for page, origin in _origins.items()})
    _pages["README.md"], _pages["examples"] = "index.md", "examples/index.md"
    for page, text, origin in _made_pages():
        files.append(File.generated(config, page, content=text))
        _origins[page], texts[page] = origin, text
        _pages[origin] = page
    _pages[f"include/ringspan/{C_HEADER}"] = "reference/c.md"
    for page, text in texts.items():
        for target in _links(text, _origins[page]):
            if not _page_of(target) and not target.startswith("docs/") and (ROOT / target).exists():
                _add_linked(target, files, config)
    return files


def _inlined(match, folder):
    """The pictures of scripts/docs_pictures.py are set into the page: only so do they take its colours, light or dark."""
    path = ROOT / "docs" / posixpath.normpath(posixpath.join(folder, match[2]))
    svg = path.read_text() if path.is_file() else ""
    if 'class="rs-picture"' not in svg:
        return match[0]
    return f"<figure>{svg.strip()}</figure>"


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    markdown = PICTURE.sub(lambda match: _inlined(match, posixpath.dirname(here)), markdown)

    def rewrite(match):
        target = _target(_origins[here], match[2])
        to = target and _page_of(target[0])
        if not to:
            return match[0]
        anchor = f"#{target[1]}" if target[1] else ""
        return f"{match[1]}({posixpath.relpath(to, posixpath.dirname(here) or '.')}{anchor})"

    return _change_links(markdown, rewrite)
