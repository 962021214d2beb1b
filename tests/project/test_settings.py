"""What scripts/settings.py writes follows from the tables, for a new row as well."""

import pytest

from horoplug._native import EngineConfig
from horoplug.base.config import Config
from scripts import settings

ROW = """
HP_SETTING(Count, least_ranks, "LEAST_RANKS", 2, 1, 1 << 4, "ranks", "",
           "ranks without which nothing runs")

#undef HP_SETTING
"""


@pytest.mark.short
def test_generated_settings_are_up_to_date():
    """Otherwise run ``python scripts/settings.py``."""
    assert settings.CODE.read_text() == settings.code()
    for file, write in (settings.STUB, settings.stub), (settings.PAGE, settings.page):
        assert file.read_text() == write(file.read_text())


@pytest.mark.short
def test_rows_are_read_as_the_compiler_reads_them():
    rows = {row.name: row for row in settings.rows()}
    assert rows["fusion_threshold"].default == 128 * 1024 * 1024
    assert rows["fusion_threshold"].high == 2**62
    assert rows["algorithm"].default is None
    assert rows["progress_cpu"].variable == ""
    assert "unset: tune only" in rows["autotune"].doc


@pytest.mark.short
def test_compiled_module_and_configuration_have_the_defaults_of_the_table():
    config, rows = EngineConfig(), settings.rows()
    assert {row.name: getattr(config, row.name) for row in rows} == {
        row.name: row.default for row in rows
    }
    assert Config().core == {row.name: row.default for row in rows if row.variable}


@pytest.mark.short
def test_a_new_row_becomes_code_and_a_line_of_the_page(tmp_path, monkeypatch):
    table = tmp_path / "settings.def"
    table.write_text(settings.TABLE.read_text().replace("\n#undef HP_SETTING\n", ROW))
    monkeypatch.setattr(settings, "TABLE", table)
    assert settings.code().endswith(
        '    least_ranks: int = variable("LEAST_RANKS", integer(1, 16), 2)\n'
    )
    assert "    least_ranks: int = 2\n" in settings.stub(settings.STUB.read_text())
    lines = settings.PAGE.read_text().splitlines()
    new = next(line for line in lines if line.startswith("| `DEADLOCK_TIME_SECONDS` | 5 |"))
    before = next(line for line in lines if line.startswith("| `OPERATION_TIMEOUT_SECONDS` |"))
    lines.remove(new)
    found = settings.page("\n".join(lines)).splitlines()
    assert found[found.index(before) + 1] == new
    assert [line for line in found if line != new] == lines
