"""Pages: nothing that is put into a template does anything to its reader."""

from pathlib import Path

from markupsafe import Markup

from components.common.data.pages import templates


def test_names_of_classes_and_files_are_text(tmp_path: Path) -> None:
    """In Markdown, too, which terminals show."""
    name = "<b>\x1b]0;x\x07\u202eab\r\nc {{ 1 }}"
    (tmp_path / "page.j2").write_text("{{ name }}|{{ markup }}|{{ number }}")
    page = templates(tmp_path, filters={}).get_template("page.j2")
    text = r"\x1b]0;x\x07\u202eab\r" + "\nc {{ 1 }}"
    said = page.render(name=name, markup=Markup(name), number=1)
    assert said == f"&lt;b&gt;{text}|<b>{text}|1"
