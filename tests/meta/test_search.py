"""The words that people search for are in the titles of the pages that answer them."""

import re

import pytest

from tests.meta.test_docs import REPOSITORY
from tests.meta.test_site import contents

# A word, and the page that a search for it should find.
PAGES = {
    "64-bit": "docs/data.md",
    "accuracy": "docs/metrics.md",
    "all_reduce": "docs/gradients.md",
    "architecture": "ARCHITECTURE.md",
    "armillary launch": "docs/launch.md",
    "asynchronous training": "docs/parameter_server.md",
    "auc": "docs/metrics.md",
    "axis names": "docs/jax_in_a_step.md",
    "batch normalization": "docs/from_pmap.md",
    "batch sizes": "docs/batch_sizes.md",
    "best checkpoint": "docs/best_checkpoint.md",
    "buckets": "docs/recompilation.md",
    "callbacks": "docs/early_stopping.md",
    "checkpoints": "docs/checkpoints.md",
    "cluster of parameter servers": "docs/parameter_server_cluster.md",
    "clustercoordinator": "docs/scheduled_functions.md",
    "comparing runs": "docs/report.md",
    "compatibility table": "docs/internals/compatibility.md",
    "compilation cache": "docs/startup.md",
    "convolutions": "docs/internals/performance.md",
    "ctrl-c": "docs/early_stopping.md",
    "custom training loops": "docs/keras_loop.md",
    "damaged checkpoints": "docs/safe_saves.md",
    "data parallel": "docs/strategies.md",
    "dead and stuck processes": "docs/watching.md",
    "debug": "docs/step_rules.md",
    "debugging": "docs/debugging.md",
    "differs between replicas": "docs/step_kinds.md",
    "dropout": "docs/random_numbers.md",
    "early stopping": "docs/early_stopping.md",
    "elastic": "docs/elastic.md",
    "ema": "docs/recipes/optimizers.md",
    "epochs": "docs/data_positions.md",
    "equinox": "docs/step_state.md",
    "errors": "docs/errors.md",
    "estimators": "docs/estimator.md",
    "evaluation": "docs/evaluation.md",
    "exact metrics": "docs/exact_metrics.md",
    "exit codes": "docs/exit_codes.md",
    "exporting": "docs/export.md",
    "f1": "docs/metrics.md",
    "faq": "docs/faq.md",
    "feature columns": "docs/canned_estimators.md",
    "files of an estimator": "docs/estimator.md",
    "fine-tuning": "docs/bert.md",
    "fsdp": "docs/sharding.md",
    "full disk": "docs/safe_saves.md",
    "goodput": "docs/goodput.md",
    "gpus": "docs/strategies.md",
    "gradient accumulation": "docs/gradient_accumulation.md",
    "gradient clipping": "docs/gradients.md",
    "grain": "docs/data_libraries.md",
    "hang detection": "docs/watching.md",
    "histograms": "docs/histograms.md",
    "hooks": "docs/estimator_hooks.md",
    "hugging face": "docs/data_libraries.md",
    "images": "docs/histograms.md",
    "inference": "docs/export.md",
    "input functions": "docs/model_functions.md",
    "install": "docs/install.md",
    "jax.pmap": "docs/from_pmap.md",
    "jax.set_mesh": "docs/jax_in_a_step.md",
    "jsonl": "docs/summaries.md",
    "keras models and the controller": "docs/keras_controller.md",
    "keras with parameter servers": "docs/parameter_server_keras.md",
    "keras": "docs/keras.md",
    "kubernetes": "docs/schedulers.md",
    "learning rate": "docs/recipes/optimizers.md",
    "limit of hang detection": "docs/hang_limit.md",
    "linen": "docs/step_state.md",
    "lost workers": "docs/parameter_server_cluster.md",
    "masked language model": "docs/recipes/masked_language_model.md",
    "max_shapes": "docs/recompilation.md",
    "metrics": "docs/metrics.md",
    "mismatch": "docs/changed_program.md",
    "mistakes": "docs/mistakes.md",
    "mixed precision": "docs/recipes/mixed_precision.md",
    "mlflow": "docs/recipes/logging.md",
    "model functions": "docs/model_functions.md",
    "multi-host training": "docs/cluster.md",
    "nan": "docs/non_finite.md",
    "nccl": "docs/cross_device_operations.md",
    "nightly job": "docs/internals/jax_releases.md",
    "open ports": "docs/communication.md",
    "orbit": "docs/from_orbit.md",
    "out of memory": "docs/faq.md",
    "parameter servers": "docs/parameter_server.md",
    "partitioned variables": "docs/parameter_server.md",
    "performance": "docs/performance.md",
    "perplexity": "docs/step_changes.md",
    "plain jax": "docs/from_plain_jax.md",
    "planning memory": "docs/plan.md",
    "plans in python": "docs/plan_in_python.md",
    "prediction": "docs/prediction.md",
    "preemption": "docs/preemption.md",
    "profiling": "docs/profiling.md",
    "progress": "docs/progress.md",
    "project template": "docs/template.md",
    "pure steps": "docs/pure_step.md",
    "pytorch": "docs/data_libraries.md",
    "q-learning": "docs/data_from_parameters.md",
    "random numbers": "docs/random_numbers.md",
    "ray": "docs/ray.md",
    "reading a plan": "docs/plan_rows.md",
    "recompilation": "docs/recompilation.md",
    "replay buffers": "docs/python_state.md",
    "reports": "docs/report.md",
    "reproducibility": "docs/random_numbers.md",
    "restarts": "docs/restarts.md",
    "resume": "docs/checkpoints.md",
    "seeds": "docs/random_numbers.md",
    "self-play": "docs/data_from_parameters.md",
    "several optimizers": "docs/recipes/optimizers.md",
    "sharding over several processes": "docs/sharding_rules.md",
    "sharding rules": "docs/sharding_rules.md",
    "silent data corruption": "docs/non_finite.md",
    "slurm": "docs/schedulers.md",
    "spot": "docs/preemption.md",
    "start-up time": "docs/startup.md",
    "stateless functions": "docs/keras_loop.md",
    "stragglers": "docs/hang_limit.md",
    "supported versions": "docs/which_jax.md",
    "suspended jobs": "docs/hang_limit.md",
    "sweep": "docs/recipes/sweep.md",
    "tensor parallelism": "docs/sharding_rules.md",
    "tensorboard": "docs/summaries.md",
    "tensorflow": "docs/from_tensorflow.md",
    "testing": "docs/debugging.md",
    "tf.data": "docs/data_libraries.md",
    "tf_config": "docs/schedulers.md",
    "tfrecord": "docs/tfrecord.md",
    "torchrun": "docs/schedulers.md",
    "tpu": "docs/choose_a_strategy.md",
    "training loops": "docs/trainer.md",
    "transfer learning": "docs/partial_restore.md",
    "troubleshooting": "docs/faq.md",
    "warnings": "docs/errors.md",
    "watchdog": "docs/internals/lifeline.md",
    "weights & biases": "docs/summaries.md",
    "without data": "docs/data_from_parameters.md",
}


def list_headings(page: str) -> list[str]:
    """Returns the title of a page and the headings below it, in lower case."""
    text = (REPOSITORY / page).read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [each.lower() for each in re.findall(r"^##? (.+)$", prose, re.MULTILINE)]


@pytest.mark.parametrize("word", PAGES)
def test_a_search_word_is_in_a_heading_of_its_page(word):
    headings = list_headings(PAGES[word])
    whole_word = re.compile(rf"\b{re.escape(word)}")
    assert any(whole_word.search(heading) for heading in headings), headings


def test_each_page_of_a_search_word_is_in_the_sidebar():
    assert set(PAGES.values()) <= set(contents.list_pages())


def test_no_two_pages_have_the_same_title():
    titles = [list_headings(page)[0] for page in contents.list_pages()]
    assert sorted(titles) == sorted(set(titles))
