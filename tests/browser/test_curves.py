"""The curves of a run in Chromium: values, zoom, legend, filter, smoothing, keys, theme, width."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.pages.report import write_report
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from tests.browser.conftest import OpenPage
from tests.trainer.pages.made_runs import append, completion, completions, journal, write_run

STEPS = 60


def report(folder: Path, name: str = "run", **changes: Any) -> Path:
    """Write the page of a run."""
    lines = journal(STEPS, **changes)
    return write_report(write_run(folder / name, lines, completions(8)))


def chart(page: Any, title: str) -> Any:
    """Return a chart by its title."""
    return page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True))


def values(figure: Any) -> dict[str, str]:
    """Return label -> value of a chart's legend."""
    buttons = figure.locator(".legend button")
    pairs = "all => all.map(b => [...b.querySelectorAll('span')].map(s => s.textContent))"
    return dict(buttons.evaluate_all(pairs))


def scale(figure: Any) -> list[float]:
    """Return the first and the last step that a chart shows."""
    return figure.evaluate("f => [f.chart.plot.scales.x.min, f.chart.plot.scales.x.max]")


def drag(page: Any, figure: Any, start: float, end: float) -> None:
    """Drag over a chart, from a share of its width to another."""
    box = figure.locator(".u-over").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * start, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, y, steps=5)
    page.mouse.up()


def test_values_at_the_cursor_are_the_journals_in_every_chart(
    tmp_path: Path, open_page: OpenPage
) -> None:
    page = open_page(report(tmp_path))
    lines = journal(STEPS)
    loss, teachers = chart(page, "Loss per compared token"), chart(page, "Loss by teacher")
    loss.scroll_into_view_if_needed()
    assert values(loss) == {"loss": f"{lines[-1]['loss']:.3g}"}
    loss.locator(".canvas").focus()
    for _ in range(11):
        page.keyboard.press("ArrowLeft")
    step = STEPS - 11
    line = lines[step - 1]
    assert loss.get_attribute("data-step") == str(step)
    assert values(loss) == {"loss": f"{line['loss']:.3g}"}
    assert values(teachers) == {
        name: f"{line[f'teacher/{name}/loss']:.3g}" for name in ("math", "code")
    }
    label = loss.locator(".canvas").get_attribute("aria-label")
    assert f"step {step}" in label
    box = loss.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    assert loss.get_attribute("data-step") == "1"


def test_zoom_is_shared_and_reset(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(report(tmp_path))
    loss, teachers = chart(page, "Loss per compared token"), chart(page, "Loss by teacher")
    loss.scroll_into_view_if_needed()
    teachers.locator("canvas").wait_for()
    for reset in ("button", "key", "double click"):
        drag(page, loss, 0.25, 0.5)
        low, high = scale(loss)
        assert low == pytest.approx(1 + (STEPS - 1) * 0.25, abs=1)
        assert high == pytest.approx(1 + (STEPS - 1) * 0.5, abs=1)
        assert scale(teachers) == [low, high]
        if reset == "button":
            page.get_by_role("button", name="Reset zoom").click()
        elif reset == "key":
            page.keyboard.press("0")
        else:
            loss.locator(".u-over").dblclick()
        assert scale(loss) == scale(teachers) == [1, STEPS]
    loss.locator(".canvas").focus()
    page.keyboard.press("+")
    assert scale(loss)[1] - scale(loss)[0] < STEPS - 1
    page.keyboard.press("-")
    assert scale(loss) == [1, STEPS]


def test_legend_hides_and_isolates_lines(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(report(tmp_path))
    figure = chart(page, "Loss by teacher")
    figure.scroll_into_view_if_needed()
    math, code = figure.locator(".legend button").all()
    visible = "f => f.chart.plot.series.slice(1).map(s => s.show)"
    math.click()
    assert math.get_attribute("aria-pressed") == "false"
    assert figure.evaluate(visible) == [False, True]
    math.click()
    code.click(modifiers=["Shift"])
    assert figure.evaluate(visible) == [False, True]
    code.click(modifiers=["Shift"])
    assert figure.evaluate(visible) == [True, True]


def test_filter_smoothing_and_scale(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(report(tmp_path))
    page.keyboard.press("/")
    page.keyboard.type("grad_norm")
    titles = page.locator("figure.chart h3").all_text_contents()
    assert titles == ["Gradient norm"]
    page.keyboard.press("Control+A")
    page.keyboard.type("no such metric")
    assert page.get_by_text("No metric has this name.").is_visible()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.press("Escape")
    figure = chart(page, "Loss per compared token")
    figure.scroll_into_view_if_needed()
    figure.locator("canvas").wait_for()
    page.get_by_label("Smoothing").fill("0.9")
    raw, smooth = figure.evaluate("f => f.chart.plot.data.slice(1).map(c => [...c])")
    total = mass = 0.0
    for value, expected in zip(smooth, raw, strict=True):
        total, mass = 0.9 * total + 0.1 * expected, 0.9 * mass + 0.1
        assert value == pytest.approx(total / mass)
    page.get_by_label("Logarithmic").check()
    assert figure.evaluate("f => f.chart.plot.scales.y.distr") == 3
    assert page.evaluate("[preferences.read('smoothing'), preferences.read('logarithmic')]") == [
        0.9,
        True,
    ]


def test_every_metric_is_in_a_chart(tmp_path: Path, open_page: OpenPage) -> None:
    lines = [{**line, "another/metric": 1.0} for line in journal(STEPS)]
    page = open_page(write_report(write_run(tmp_path / "run", lines)))
    keys = page.evaluate(
        "() => [...chartState.charts].flatMap(c => c.lines.flatMap(l => [l.key, l.low, l.high]))"
    )
    assert set(keys) >= {key for line in lines for key in line} - {"step"}


def test_tabs_keys_and_help(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(report(tmp_path))
    for number, name in enumerate(("Curves", "Completions", "Teachers", "Settings"), 1):
        page.keyboard.press(str(number))
        assert page.get_by_role("region", name=name).is_visible()
        selected = page.get_by_role("tab", selected=True)
        assert selected.all_text_contents() == [name]
        assert page.url.endswith(f"#{name.lower()}")
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog", name="Keys").is_visible()
    page.get_by_role("tab", name="Teachers").click()
    card = page.locator(".card", has_text="code")
    assert card.locator(".state").text_content() == "retried"
    assert card.locator("rect.retried").count() == STEPS // 7
    assert "16" in card.locator("dl div", has_text="retries").text_content()
    row = page.locator("tr", has_text="student")
    assert re.search(r"\d+\.\d% \(\d+\.\d–\d+\.\d\)", row.text_content())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_until_it_is_chosen(
    tmp_path: Path, open_page: OpenPage, scheme: str
) -> None:
    page = open_page(report(tmp_path), color_scheme=scheme)
    name = "document.documentElement.dataset.theme"
    assert page.evaluate(name) == scheme
    other = {"light": "dark", "dark": "light"}[scheme]
    page.keyboard.press("d")
    assert page.evaluate(name) == other
    assert page.evaluate("preferences.read('theme')") == other
    # Chromium may save the choice after a reload.
    page.add_init_script(f"localStorage.setItem('mopd.theme', '\"{other}\"')")
    page.reload()
    assert page.evaluate(name) == other
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(name) == scheme


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("scheme", "sign"), [("light", -1), ("dark", 1)])
def test_shades_are_ordered_and_texts_have_contrast(
    tmp_path: Path, open_page: OpenPage, scheme: str, sign: int
) -> None:
    page = open_page(report(tmp_path), "completions", color_scheme=scheme)
    colours = """all => all.map(e => {
        const own = getComputedStyle(e);
        const ground = (each) => getComputedStyle(each).backgroundColor;
        let back = e;
        while (ground(back) === "rgba(0, 0, 0, 0)") back = back.parentElement;
        return [own.color, ground(back)];
    })"""
    shades = page.locator(".shades span[class^=s]").evaluate_all(colours)
    values = [sign * luminance(background) for _, background in shades]
    assert len(values) == 7
    assert values == sorted(set(values))
    texts = page.locator(".facts, .hint, .role, .tabs button, .label, .figure, h3, .state, .token")
    for text, background in [*shades, *texts.evaluate_all(colours)]:
        low, high = sorted([luminance(text), luminance(background)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, background)


@pytest.mark.parametrize("width", [340, 800])
def test_no_tab_is_wider_than_a_narrow_screen(
    tmp_path: Path, open_page: OpenPage, width: int
) -> None:
    long = completion([b"x" * 300, b" " * 30, b"y" * 300, *[b"ab"] * 200], teacher="long" * 12)
    folder = write_run(
        tmp_path / "a", [{**j, f"metric/{'m' * 90}": 1.0} for j in journal(3)], [long]
    )
    page = open_page(write_report(folder, folder), viewport={"width": width, "height": 700})
    for name in ("curves", "completions", "teachers", "settings"):
        page.locator(f"#tab-{name}").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name


def test_two_runs_are_in_every_chart(tmp_path: Path, open_page: OpenPage) -> None:
    first = write_run(tmp_path / "a" / "run", journal(STEPS), completions(8))
    second = write_run(tmp_path / "b" / "run", journal(90, scale=2.0), completions(8, seed=0))
    (first / "config.yaml").write_text("max_steps: 60\nseed: 0\n")
    (second / "config.yaml").write_text("max_steps: 60\nseed: 1\n")
    page = open_page(write_report(first, second))
    loss, teachers = chart(page, "Loss per compared token"), chart(page, "Loss by teacher")
    loss.scroll_into_view_if_needed()
    last = [journal(STEPS)[-1]["loss"], journal(90, scale=2.0)[-1]["loss"]]
    assert values(loss) == {
        name: f"{value:.3g}" for name, value in zip(("a/run", "b/run"), last, strict=True)
    }
    dashes = "f => f.chart.plot.series.slice(1).map(s => s.dash.length)"
    teachers.locator("canvas").wait_for()
    assert teachers.evaluate(dashes) == [0, 0, 2, 2]
    x, *columns = loss.evaluate("f => f.chart.plot.data.map(c => [...c])")
    assert x == [*range(1, 91)]
    assert [sum(value is not None for value in column) for column in columns] == [STEPS, 90]
    page.keyboard.press("2")
    articles = page.locator(".detail article")
    assert articles.locator("h3").all_text_contents() == ["a/run", "b/run"]
    texts = [article.locator(".chunk").all_text_contents() for article in articles.all()]
    assert texts[0] == texts[1] != []
    page.keyboard.press("4")
    assert page.locator("mark").all_text_contents() == ["seed: 0\n", "seed: 1\n"]


def test_page_of_many_steps_draws_what_is_in_view(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(write_report(write_run(tmp_path / "run", journal(3_000))))
    page.locator("canvas").first.wait_for()
    drawn = "() => [...chartState.charts].filter(c => c.plot).length"
    total = page.evaluate("() => chartState.charts.size")
    assert 0 < page.evaluate(drawn) < total
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    for figure in page.locator("figure.chart").all():
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").wait_for()
    assert page.evaluate(drawn) == total


def test_data_of_a_page_is_json(tmp_path: Path, open_page: OpenPage) -> None:
    hostile = "</script><script>window.hacked = 1</script><!--<script>"
    line = completion([hostile.encode(), b"\xff", b"\xe2\x80\xae"], teacher=hostile)
    lines = [{**each, f"teacher/{hostile}/loss": 1.0, hostile: 2.0} for each in journal(2)]
    folder = write_run(tmp_path / "run", lines, [line])
    (folder / "config.yaml").write_text(f"name: '{hostile}'\nmax_steps: 2\n")
    page = open_page(write_report(folder), "completions")
    assert page.evaluate("window.hacked") is None
    assert json.loads(page.locator("#data").text_content())["runs"][0]["completions"] == [line]
    assert page.locator(".token").first.text_content() == hostile.replace(" ", "␣")
    assert page.locator(".token[data-side=student]").all_text_contents()[1:] == ["\\xff", "\\u202e"]
    page.keyboard.press("4")
    assert hostile in page.locator(".config").text_content()
    assert (folder / JOURNAL).is_file()
    append(folder / COMPLETIONS, [line])


def test_labels_of_bytes_fit_and_constants_are_flat(tmp_path: Path, open_page: OpenPage) -> None:
    lines = journal(STEPS)
    for step, line in enumerate(lines):
        line["teacher/math/received_bytes"] = 176_000.0 + 700 * (step % 9)
        line["compared_share"] = 1 - 1e-8 * (step % 3)
        line["grad_norm"] = 0.5 + 1e-8 * (step % 3)
    page = open_page(write_report(write_run(tmp_path / "run", lines, completions(8))))
    figure = chart(page, "Received bytes")
    figure.scroll_into_view_if_needed()
    labels, widths, room = figure.evaluate(
        """f => {
          const { plot } = f.chart, axis = plot.axes[1];
          const labels = axis._values.filter(Boolean);
          measuring.font = `11px ${cssVariable("font")}`;
          return [labels, labels.map(l => measuring.measureText(l).width), axis._size];
        }"""
    )
    assert len(set(labels)) == len(labels) > 1
    assert all(re.fullmatch(r"\d+(\.\d+)? (B|KiB)", label) for label in labels)
    assert max(widths) + 9 <= room
    tile = page.locator("main, body").get_by_text("compared tokens").first.locator("xpath=..")
    points = str(tile.locator("polyline").get_attribute("points")).split()
    assert len({point.partition(",")[2] for point in points}) == 1
