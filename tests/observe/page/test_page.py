"""What the status page shows of a document, in a browser."""

import logging
import math
from dataclasses import replace

import pytest
from playwright.async_api import Page, expect

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ArrivalStatus,
    ErrorStatus,
    EvaluationStatus,
    PastRun,
    RoundStatus,
    WeightStatus,
)
from gradserve_server.limits import MAX_NAME_BYTES
from tests.observe.page.documents import document, idle
from tests.observe.page.documents_server import START_SECONDS, DocumentsServer
from tests.observe.page.open_page import PHONE, OpenPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOTHING = "\N{EN DASH}"
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


async def cells(page: Page, table: str) -> list[list[str]]:
    """Returns the texts of the rows of a table."""
    rows: list[list[str]] = await page.locator(f"#{table} tbody").evaluate(
        "body => [...body.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return rows


async def test_accumulators_have_steps_rates_open_rounds_and_waiting_calls(page: Page) -> None:
    rows = await cells(page, "accumulators")
    assert ["resnet50/gradients", "6,874", "0.63", "14/15", "14", "102 MB"] in rows
    assert ["eval/metrics", "1", "0", "0", "0", "8.19 kB"] in rows
    assert await page.locator("#list-count").text_content() == "6"


async def test_the_slow_worker_is_named_at_once(page: Page) -> None:
    ended = document(START_SECONDS).accumulators[0].rounds[:-1]
    in_time = [[arrival for arrival in each.arrivals if not arrival.stale] for each in ended]
    waited = sum(each[-1].after - each[-2].after for each in in_time) / len(ended)
    await expect(page.locator("#verdict")).to_have_text(
        "worker-015 holds the others up: it came last in 19 of 19 rounds, "
        f"which waited {1000 * waited:.0f} ms each for it alone."
    )
    labels = await page.locator("#timeline .lane-label").all_text_contents()
    assert labels[:3] == ["16 workers", "worker-015", "worker-014"]


async def test_stragglers_are_ranked(page: Page) -> None:
    rows = await cells(page, "workers")
    assert [row[0] for row in rows[:2]] == ["worker-015", "worker-014"]
    assert len(rows) == 16
    assert [float(row[1].removeprefix("+").removesuffix(" ms")) for row in rows[2:]] == sorted(
        (float(row[1].removeprefix("+").removesuffix(" ms")) for row in rows[2:]), reverse=True
    )


async def test_a_timeline_marks_who_came_last_too_late_or_not_at_all(
    opened: OpenPage, documents: DocumentsServer
) -> None:
    arrivals = (ArrivalStatus("early"), ArrivalStatus("middle", 0.2), ArrivalStatus("slow", 1.0))
    rounds = (
        RoundStatus(1, 100.0, 101.0, 3, (*arrivals, ArrivalStatus("stale", 1.5, stale=True))),
        RoundStatus(2, 102.0, 103.0, 3, arrivals, missing=("gone",)),
        RoundStatus(3, 109.0, 0.0, 3, arrivals[:1]),
    )
    accumulator = AccumulatorStatus(
        "default", "few", 2, rounds=rounds, missing=("slow",), num_required=3, num_waiting=1
    )
    documents.document = replace(document(110.0), accumulators=(accumulator,))
    page = await opened.at(documents.url)
    svg = page.locator("#timeline svg")
    counts = {kind: await svg.locator(f".{kind}").count() for kind in ("came", "last", "stale", "missing", "expected")}
    assert counts == {"came": 5, "last": 2, "stale": 1, "missing": 1, "expected": 1}
    assert "The last 3 rounds of 5 workers, the slowest first" in str(await svg.get_attribute("aria-label"))
    await page.locator("#rounds-details summary").click()
    assert await cells(page, "rounds") == [
        ["open", "1.00 s", "1", "0", NOTHING, "0 s", NOTHING],
        ["2", "1.00 s", "3", "0", "slow", "800 ms", "gone"],
        ["1", "1.00 s", "3", "1", "slow", "800 ms", NOTHING],
    ]
    await svg.locator(".stale").hover()
    await expect(page.locator("#tooltip")).to_have_text(
        "stale: came too late for the round to step 1, 1.50 s after the first"
    )


async def test_rounds_are_replayed_under_other_rules(page: Page) -> None:
    await page.locator("#what-if summary").click()
    await expect(page.locator("#rules")).to_be_visible()
    rows = await cells(page, "rules")
    assert [row[0] for row in rows] == ["16", "15", "14", "13", "9"]
    assert rows[1][3] == "as required"
    assert {row[1] for row in rows} == {NOTHING}
    await expect(page.locator("#what-if-text")).to_contain_text("gradients")
    await page.locator("#parameters button.name").click()
    await expect(page.locator("#rules tbody tr")).to_have_count(6)
    rows = await cells(page, "rules")
    assert {row[0] for row in rows} == {"4", "3", "2", "1"}
    assert any(row[1] != NOTHING for row in rows)


async def test_past_runs_are_fetched_when_they_are_opened_and_found_by_the_filter(
    opened: OpenPage, documents: DocumentsServer
) -> None:
    runs = (
        PastRun("parameters", "default", "llm", "1", 1.7e9, 1.7e9 + 60, 1200, {"loss": 0.25}, "deleted"),
        PastRun("accumulator", "team", "<i>net</i>", "2", 1.7e9, 0.0, 0, {}, "lost when the server was started again"),
    )
    documents.document = replace(document(START_SECONDS), past_runs=runs)
    page = await opened.at(documents.url)
    assert all(not each.max_past_runs for each in documents.requests)
    await page.locator("#past summary").click()
    await expect(page.locator("#past-runs tbody tr")).to_have_count(2)
    (first, second) = await cells(page, "past-runs")
    assert [first[at] for at in (0, 1, 2, 5, 6)] == ["llm", "parameters", "1,200", "loss 0.25", "deleted"]
    assert "2023" in first[3]
    assert [second[at] for at in (0, 2, 4, 5)] == ["team/<i>net</i>", NOTHING, NOTHING, NOTHING]
    await page.locator("#filter").fill("NET")
    await expect(page.locator("#past-runs tbody tr")).to_have_count(1)
    await page.locator("#filter").fill("none of them")
    await expect(page.locator("#past-runs-empty")).to_have_text("No past run has “none of them” in its name.")


async def test_the_log_is_shown_when_it_is_opened_and_searched(opened: OpenPage, documents: DocumentsServer) -> None:
    for level, message in ((logging.INFO, "a round of <i>net</i>"), (logging.ERROR, "a disk is full")):
        documents.logs.handle(logging.LogRecord("gradserve_server.x", level, __file__, 1, message, (), None))
    page = await opened.at(documents.url)
    await page.locator("#log summary").click()
    rows = page.locator("#log-lines tbody tr")
    await expect(rows).to_have_count(2)
    assert [row[1:] for row in await cells(page, "log-lines")] == [
        ["ERROR", "a disk is full", NOTHING],
        ["INFO", "a round of <i>net</i>", NOTHING],
    ]
    await page.locator("#log-filter").fill("ROUND")
    await expect(rows).to_have_count(1)
    await page.locator("#log-level").select_option("error")
    await expect(page.locator("#log-lines-empty")).to_have_text("No line of the log fits.")


async def test_bytes_memory_layers_calls_and_errors_are_shown(page: Page) -> None:
    assert await page.locator("#traffic h3").all_text_contents() == ["gRPC", "Bulk sockets", "Shared memory"]
    assert await page.locator("#memory .purpose").first.inner_text() == "Tensors\n1.28 GB of 8.00 GB"
    assert (await cells(page, "layers"))[0] == ["resnet50/bn1", "1", "82.0 kB"]
    methods = {row[0]: row[1:] for row in await cells(page, "methods")}
    assert methods["TakeGradient"] == ["Accumulator", "0", "48,919", "0", "31", "123 µs", "16 ms", ""]
    assert (await cells(page, "errors"))[0] == [
        "DEADLINE_EXCEEDED", "TakeGradient", "31", "44 s ago", "15 of 16 gradients; missing: worker-015",
    ]  # fmt: skip


async def test_parameters_are_listed_beside_accumulators(page: Page) -> None:
    assert await cells(page, "parameters") == [["llm/outer", "6,874", "0.63", "2/3", "2", "3/4", "102 MB"]]
    assert await page.locator("#parameters-count").text_content() == "1"


async def test_parameters_are_described_with_their_weights_and_the_reasons_of_rounds(page: Page) -> None:
    await page.locator("#parameters button.name").click()
    await expect(page.locator("#detail-title")).to_have_text("llm/outer")
    await expect(page.locator("#records")).to_have_count(1)
    facts = dict(
        zip(
            await page.locator("#facts dt").all_text_contents(),
            await page.locator("#facts dd").all_text_contents(),
            strict=True,
        )
    )
    assert facts["Optimizer"] == "sgd(lr=0.7, momentum=0.9, nesterov=True)"
    assert facts["Learning rate"] == "0.35"
    assert facts["A round ends after"] == "3 updates, deadline 2 s"
    assert facts["Rounds ended by"] == "7 required, 12 deadline"
    assert facts["Live workers in the latest round"] == "3/4"
    assert facts["Workers that have left"] == "worker-900"
    assert facts["Weight"] == "64 accepted = 48 applied + 14 pending + 2 dropped"
    assert facts["Weight refused"] == "3 stale, 1 already counted"
    opened, latest = (await cells(page, "records"))[:2]
    assert (opened[0], opened[1], opened[3]) == ("open", NOTHING, NOTHING)
    assert (latest[0], latest[1], latest[3], latest[5]) == ("6,874", "deadline", "20 ms", "2")
    assert await cells(page, "rounds") == []
    assert "kind=parameters" in page.url
    await page.reload()
    await expect(page.locator("#detail-title")).to_have_text("llm/outer")
    await expect(page.locator("#parameters tr.selected")).to_have_count(1)
    await expect(page.locator("#accumulators tr.selected")).to_have_count(0)


async def test_metrics_of_parameters_are_curves_and_words(opened: OpenPage, documents: DocumentsServer) -> None:
    whole = document(START_SECONDS)
    (described,) = whole.parameters
    rounds = (
        RoundStatus(1, 1.0, 2.0, 1, (ArrivalStatus("a"),), metrics={"loss": 2.0, HOSTILE: 1.0}),
        RoundStatus(2, 3.0, 4.0, 1, (ArrivalStatus("a"),), metrics={"loss": math.nan}),
        RoundStatus(3, 5.0, 6.0, 1, (ArrivalStatus("a"),), metrics={"loss": 0.51239}),
        RoundStatus(4, 7.0, 0.0, 1, (ArrivalStatus("a"),)),
    )
    evaluations = (EvaluationStatus(0, {"loss": 3.0}), EvaluationStatus(3, {"accuracy": 0.75, "loss": math.inf}))
    parameters = replace(described, rounds=rounds, evaluations=evaluations)
    documents.document = replace(whole, accumulators=(), parameters=(parameters,))
    page = await opened.at(documents.url)
    await expect(page.locator("#curves li")).to_have_count(3)
    names = await page.locator("#curves .name").all_text_contents()
    assert names == [HOSTILE, "accuracy", "loss"]
    words = await page.locator("#curves svg").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    assert words == [
        f"{HOSTILE}: 1 in the round to step 1.",
        "accuracy: 0.75 evaluated at step 3.",
        "loss: 0.5124 in the round to step 3, 2 in that to step 1; Infinity evaluated at step 3.",
    ]
    assert await page.locator("#curves li").nth(2).locator(".evaluated").count() == 1
    rows = await cells(page, "records")
    assert [row[-1] for row in rows] == [NOTHING, "loss 0.5124", "loss NaN", f"{HOSTILE} 1, loss 2"]
    assert await page.title() != "run"


async def test_weight_that_is_lost_breaks_the_equation(opened: OpenPage, documents: DocumentsServer) -> None:
    whole = document(START_SECONDS)
    (described,) = whole.parameters
    documents.document = replace(
        whole, accumulators=(), parameters=(replace(described, weights=WeightStatus(3.0, 1.0, 1.5)),)
    )
    page = await opened.at(documents.url)
    await expect(page.locator("#facts")).to_contain_text("3 accepted \N{NOT EQUAL TO} 1 applied + 1.5 pending")


async def test_rates_are_those_between_two_documents(opened: OpenPage, documents: DocumentsServer) -> None:
    documents.document = lambda time: document(START_SECONDS + time)
    page = await opened.at(documents.url)
    await expect(page.locator("#traffic .amount").nth(2)).to_have_text("211 MB/s")
    await expect(page.locator(".tile-value").nth(2)).to_have_text("263 MB/s")


async def test_nothing_from_the_server_becomes_markup(opened: OpenPage, documents: DocumentsServer) -> None:
    rounds = (RoundStatus(1, 1.0, 2.0, 1, (ArrivalStatus(HOSTILE), ArrivalStatus("other", 0.5)), missing=(HOSTILE,)),)
    hostile = replace(idle(HOSTILE, 3), container=HOSTILE, rounds=rounds)
    error = ErrorStatus(HOSTILE, HOSTILE, HOSTILE, 1, 1.0)
    whole = document(START_SECONDS)
    documents.document = replace(
        whole, version=HOSTILE, device=HOSTILE, accumulators=(hostile,), errors=(error,),
        layers=(replace(whole.layers[0], name=HOSTILE),), memory=(replace(whole.memory[0], purpose=HOSTILE),),
        traffic=(replace(whole.traffic[0], way=HOSTILE),),
        methods=(replace(whole.methods[0], service=HOSTILE, method=HOSTILE),),
        parameters=(replace(whole.parameters[0], name=HOSTILE, rules=HOSTILE, optimizer=HOSTILE),),
    )  # fmt: skip
    page = await opened.at(documents.url)
    assert await page.locator("body img, body script").count() == 0
    assert await page.locator("#detail-title").text_content() == f"{HOSTILE}/{HOSTILE}"
    assert await page.title() != "run"


async def test_1000_accumulators_and_500_workers_stay_readable_and_quick(
    opened: OpenPage, documents: DocumentsServer
) -> None:
    documents.document = document(START_SECONDS, num_accumulators=1000, num_workers=500)
    page = await opened.at(documents.url)
    await expect(page.locator("#list-count")).to_have_text("50 of 1,000")
    assert len(await cells(page, "accumulators")) == 50
    assert len(await cells(page, "workers")) == 50
    labels = await page.locator("#timeline .lane-label").all_text_contents()
    assert labels[:3] == ["500 workers", "worker-499", "worker-498"]
    assert len(labels) == 1 + 12
    assert await page.evaluate("document.querySelectorAll('*').length") < 3500
    await page.locator("#worker-filter").fill("WORKER-123")
    await expect(page.locator("#timeline .lane-label")).to_have_text(["500 workers", "worker-123"])
    await page.locator("#more").click()
    await expect(page.locator("#list-count")).to_have_text("100 of 1,000")
    assert max(request.max_accumulators for request in documents.requests) == 100
    assert all(request.max_rounds == 1 or request.max_accumulators == 1 for request in documents.requests)


async def test_an_accumulator_with_the_longest_name_is_found(opened: OpenPage, documents: DocumentsServer) -> None:
    names = [letter * (MAX_NAME_BYTES // 2) for letter in ("\u00c4", "\u00e4")]
    named = [replace(idle(name, 1), container="\u00fc" * (MAX_NAME_BYTES // 2)) for name in names]
    documents.document = replace(document(START_SECONDS), accumulators=tuple(named))
    page = await opened.at(documents.url, shown="#list-count")
    await page.locator("#accumulators .name").nth(1).click()
    await expect(page.locator("#detail-title")).to_have_text(f"{named[1].container}/{named[1].name}")
    await expect(page.locator("#verdict")).to_have_text("No round has ended yet, or none lately.")


async def test_on_a_phone_nothing_is_wider_than_the_screen(opened: OpenPage, documents: DocumentsServer) -> None:
    documents.document = document(START_SECONDS, num_accumulators=100, num_workers=60)
    page = await opened.at(documents.url, size=PHONE)
    await page.locator("#past > summary").click()
    await page.locator("#log > summary").click()
    assert await page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    await page.get_by_role("button", name="embedding/rows").click()
    await expect(page.locator("#detail-title")).to_be_in_viewport()
