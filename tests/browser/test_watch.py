"""A running run in Chromium: new steps and completions appear without a reload."""

import json
from pathlib import Path

from mopd_trainer.pages.watch import watch_server
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from tests.browser.conftest import OpenPage
from tests.browser.test_curves import chart, values
from tests.trainer.pages.made_runs import append, completion, completions, journal, write_run
from tests.trainer.pages.test_watch import running


def test_new_lines_appear_and_a_resumed_run_starts_again(
    tmp_path: Path, open_page: OpenPage
) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "config.yaml").write_text("max_steps: 40\n")
    with running(watch_server([folder], host="127.0.0.1", port=0)) as server:
        page = open_page(server.url)
        assert page.locator(".run-title .state").text_content() == "no step yet"
        page.evaluate("window.loaded = 1")
        append(folder / JOURNAL, journal(20))
        page.get_by_text("step 20 of 40").wait_for()
        loss = chart(page, "Loss per compared token")
        assert values(loss) == {"loss": f"{journal(20)[-1]['loss']:.3g}"}
        assert page.locator(".run-title .state").text_content() == "live"
        loss.scroll_into_view_if_needed()
        loss.locator("canvas").wait_for()
        page.get_by_role("tab", name="Completions").click()
        append(folder / COMPLETIONS, completions(4))
        page.get_by_text("4 of 4 logged completions").wait_for()
        page.keyboard.press("j")
        chosen = page.locator(".message pre").text_content()
        append(folder / COMPLETIONS, [completion([b"new", b"est"], nats=50.0)])
        page.get_by_text("5 of 5 logged completions").wait_for()
        assert page.locator(".item .completion").first.text_content() == "newest"
        assert page.locator(".message pre").text_content() == chosen
        page.keyboard.press("1")
        # New metrics get a chart; steps continue.
        append(folder / JOURNAL, [{**line, "a/new": 3.0} for line in journal(20, first=21)])
        page.get_by_text("step 40 of 40").wait_for()
        assert page.locator(".run-title .state").text_content() == "finished"
        assert loss.evaluate("f => f.chart.lines[0].run.steps.length") == 40
        assert page.evaluate("window.loaded") == 1
        (folder / "new").write_text("".join(json.dumps(line) + "\n" for line in journal(7)))
        (folder / "new").replace(folder / JOURNAL)
        page.get_by_text("step 7 of 40").wait_for()
        assert page.evaluate("window.loaded") is None


def test_only_the_shown_completion_is_loaded(tmp_path: Path, open_page: OpenPage) -> None:
    long = completion([b"word "] * 200, nats=0.001)
    lines = [*completions(30), long]
    folder = write_run(tmp_path / "run", journal(20), lines)
    with running(watch_server([folder], host="127.0.0.1", port=0)) as server:
        page = open_page(server.url)
        requested: list[str] = []
        page.on("request", lambda sent: "/completion?" in sent.url and requested.append(sent.url))
        page.get_by_role("tab", name="Completions").click()
        page.locator(".chunk").first.wait_for()
        assert len(requested) == 1
        page.get_by_label("Order").select_option("longest")
        page.locator(".chunk").nth(198).wait_for()
        assert page.locator(".item").count() == len(lines)
        assert page.locator(".token[data-side=student]").count() == 200
        page.keyboard.press("Escape")
        page.locator(".item").first.click()  # is not loaded again
        page.locator(".token").first.hover()
        page.locator(".inspector .bars").first.wait_for()
        assert len(requested) == 2
        page.evaluate("() => { window.fetch = async () => { throw new Error('lost'); }; }")
        page.locator(".item").nth(5).click()
        page.get_by_text("The tokens could not be loaded.").wait_for()
        assert page.locator("pre.text").text_content() in {line["completion"] for line in lines}


def test_lost_server_is_shown(tmp_path: Path, open_page: OpenPage) -> None:
    folder = write_run(tmp_path / "run", journal(3))
    with running(watch_server([folder], host="127.0.0.1", port=0)) as server:
        page = open_page(server.url)
        page.evaluate("() => { window.fetch = async () => { throw new Error('lost'); }; }")
        page.locator(":root[data-connection=lost]").wait_for(state="attached")
