"""Running a step so that a request which breaks the model does not take its neighbours with it."""

from dataclasses import replace

from wsbatch.engine.worker import Worker
from wsbatch.errors import StepFailed
from wsbatch.steps import PagedStep, StepPlan, StepResult


async def run_step(worker: Worker, plan: StepPlan) -> tuple[StepResult, dict[int, StepFailed]]:
    """Run a plan; where a paged one raises, find the rows that make it raise, by halves.

    Rows that the model itself names in `StepResult.failed` need no search. Writing a row's keys and values twice
    changes nothing, so the halves of a paged step can be run again. A padded batch has one cache for all rows: where it
    raises, it is lost as a whole.

    Returns the result, in plan order, and the rows that failed by key; a failed row that samples has id 0 in the
    result. Raises StepFailed where the whole step is lost: a padded one, or a paged one of a single row, that raised.
    """
    try:
        result = await worker.step(plan)
        return result, {key: StepFailed(reason) for key, reason in result.failed.items()}
    except StepFailed:
        if not isinstance(plan, PagedStep) or len(plan.rows) == 1:
            raise
    middle = len(plan.rows) // 2
    results: list[StepResult] = []
    failed: dict[int, StepFailed] = {}
    for rows in (plan.rows[:middle], plan.rows[middle:]):
        try:
            result, failures = await run_step(worker, replace(plan, rows=rows))
        except StepFailed as error:
            (row,) = rows
            result, failures = StepResult((0,) * (row.sampling is not None), None, 0.0), {row.key: error}
        results.append(result)
        failed |= failures
    first, second = results
    logprobs = None
    if first.logprobs or second.logprobs:
        logprobs = tuple(value for part in results for value in part.logprobs or (None,) * len(part.token_ids))
    return StepResult(first.token_ids + second.token_ids, logprobs, first.model_ms + second.model_ms), failed
