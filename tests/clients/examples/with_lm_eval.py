"""lm-evaluation-harness: over HTTP, tasks have the log-likelihoods, texts and scores of `--model hf`."""

import logging
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, SOURCE = sys.argv[1:]
# for a whole continuation, which is stricter than for each token
TOLERANCE_NATS = 1e-3
logging.disable(logging.WARNING)
TASKS = TaskManager(include_path="facts", include_defaults=False)
OWN = {"pretrained": SOURCE, "dtype": "float32"}
COMPLETIONS = {"model": "onesweep", "base_url": f"{URL}/completions", "tokenizer": SOURCE}
CHATS = {"model": "onesweep", "base_url": f"{URL}/chat/completions"}


def evaluated(task: str, model: str, arguments: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """The scores of a task, and what the model said to each request of it."""
    results = simple_evaluate(
        model, model_args=arguments, tasks=[task], task_manager=TASKS, bootstrap_iters=0, device="cpu", **more
    )
    replies = [reply for sample in results["samples"][task] for reply in sample["filtered_resps"]]
    return results["results"][task], replies


for task, kinds in (
    ("facts", ({"batch_size": 8}, {"batch_size": 3, "num_concurrent": 4, "tokenized_requests": False})),
    ("facts_rolled", ({"batch_size": 8, "num_concurrent": 2},)),
):
    scores, expected = evaluated(task, "hf", OWN)
    for kind in kinds:
        found_scores, found = evaluated(task, "local-completions", COMPLETIONS | kind)
        assert found_scores.get("acc,none") == scores.get("acc,none")
        for one, other in zip(found, expected, strict=True):
            nats, hf_nats = (each[0] if isinstance(each, tuple) else each for each in (one, other))
            assert abs(nats - hf_nats) < TOLERANCE_NATS, (task, kind, one, other)

# the harness sends all strings that end a text in a completion, the first four in a chat
for model, arguments, chat in (("local-completions", COMPLETIONS, False), ("local-chat-completions", CHATS, True)):
    texts = []
    for kind, own in (("hf", OWN), (model, arguments)):
        _, replies = evaluated("facts_written", kind, own, apply_chat_template=chat, limit=8)
        texts.append([text.rstrip("\ufffd") for text in replies])  # an incomplete character at the end is not shown
    assert texts[0] == texts[1]
