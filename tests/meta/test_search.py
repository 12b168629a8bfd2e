"""The words that people search for are in the titles of the pages that answer them."""

import re

import pytest

from tests.meta.test_docs import REPOSITORY
from tests.meta.test_site import contents

# A word, and the page that a search for it should find.
PAGES = {
    "64-bit": "docs/data/index.md",
    "accuracy": "docs/train/metrics.md",
    "all_reduce": "docs/devices/gradients.md",
    "architecture": "ARCHITECTURE.md",
    "armillary launch": "docs/machines/launch.md",
    "asynchronous training": "docs/advanced/parameter_server.md",
    "auc": "docs/train/metrics.md",
    "axis names": "docs/devices/jax_in_a_step.md",
    "batch normalization": "docs/migrate/from_pmap.md",
    "batch sizes": "docs/data/batch_sizes.md",
    "best checkpoint": "docs/checkpoints/best.md",
    "buckets": "docs/train/recompilation.md",
    "callbacks": "docs/train/early_stopping.md",
    "checkpoints": "docs/checkpoints/index.md",
    "cluster of parameter servers": "docs/advanced/parameter_server_cluster.md",
    "clustercoordinator": "docs/advanced/scheduled_functions.md",
    "comparing runs": "docs/logs/report.md",
    "compatibility table": "docs/internals/compatibility.md",
    "compilation cache": "docs/long_runs/startup.md",
    "convolutions": "docs/internals/performance.md",
    "ctrl-c": "docs/train/early_stopping.md",
    "custom training loops": "docs/keras/custom_loop.md",
    "damaged checkpoints": "docs/checkpoints/safe_saves.md",
    "data parallel": "docs/devices/strategies.md",
    "dead and stuck processes": "docs/long_runs/watching.md",
    "debug": "docs/train/step_rules.md",
    "debugging": "docs/train/debugging.md",
    "differs between replicas": "docs/train/step_kinds.md",
    "dropout": "docs/devices/random_numbers.md",
    "early stopping": "docs/train/early_stopping.md",
    "elastic": "docs/machines/elastic.md",
    "ema": "docs/recipes/optimizers.md",
    "epochs": "docs/data/positions.md",
    "equinox": "docs/train/step_state.md",
    "errors": "docs/train/errors.md",
    "estimators": "docs/advanced/estimator.md",
    "evaluation": "docs/train/evaluation.md",
    "exact metrics": "docs/train/exact_metrics.md",
    "exit codes": "docs/machines/exit_codes.md",
    "exporting": "docs/train/export.md",
    "f1": "docs/train/metrics.md",
    "faq": "docs/start/faq.md",
    "feature columns": "docs/advanced/canned_estimators.md",
    "files of an estimator": "docs/advanced/estimator.md",
    "fine-tuning": "docs/train/bert.md",
    "fsdp": "docs/devices/sharding.md",
    "full disk": "docs/checkpoints/safe_saves.md",
    "goodput": "docs/long_runs/goodput.md",
    "gpus": "docs/devices/strategies.md",
    "gradient accumulation": "docs/train/gradient_accumulation.md",
    "gradient clipping": "docs/devices/gradients.md",
    "grain": "docs/data/libraries.md",
    "hang detection": "docs/long_runs/watching.md",
    "histograms": "docs/logs/histograms.md",
    "hooks": "docs/advanced/estimator_hooks.md",
    "hugging face": "docs/data/libraries.md",
    "images": "docs/logs/histograms.md",
    "inference": "docs/train/export.md",
    "input functions": "docs/advanced/model_functions.md",
    "install": "docs/start/install.md",
    "jax.pmap": "docs/migrate/from_pmap.md",
    "jax.set_mesh": "docs/devices/jax_in_a_step.md",
    "jsonl": "docs/logs/summaries.md",
    "keras models and the controller": "docs/keras/controller.md",
    "keras with parameter servers": "docs/advanced/parameter_server_keras.md",
    "keras": "docs/keras/index.md",
    "kubernetes": "docs/machines/schedulers.md",
    "learning rate": "docs/recipes/optimizers.md",
    "limit of hang detection": "docs/long_runs/hang_limit.md",
    "linen": "docs/train/step_state.md",
    "lost workers": "docs/advanced/parameter_server_cluster.md",
    "masked language model": "docs/recipes/masked_language_model.md",
    "max_shapes": "docs/train/recompilation.md",
    "metrics": "docs/train/metrics.md",
    "mfu": "docs/logs/speed.md",
    "mismatch": "docs/checkpoints/changed_program.md",
    "mistakes": "docs/train/mistakes.md",
    "mixed precision": "docs/recipes/mixed_precision.md",
    "mlflow": "docs/recipes/logging.md",
    "model functions": "docs/advanced/model_functions.md",
    "multi-host training": "docs/machines/cluster.md",
    "nan": "docs/train/non_finite.md",
    "nccl": "docs/devices/cross_device_operations.md",
    "nightly job": "docs/internals/jax_releases.md",
    "open ports": "docs/machines/communication.md",
    "orbit": "docs/migrate/from_orbit.md",
    "out of memory": "docs/start/faq.md",
    "parameter servers": "docs/advanced/parameter_server.md",
    "partitioned variables": "docs/advanced/parameter_server.md",
    "performance": "docs/long_runs/performance.md",
    "perplexity": "docs/migrate/step_changes.md",
    "plain jax": "docs/migrate/from_plain_jax.md",
    "planning memory": "docs/devices/plan.md",
    "plans in python": "docs/devices/plan_in_python.md",
    "prediction": "docs/train/prediction.md",
    "preemption": "docs/long_runs/preemption.md",
    "profiling": "docs/long_runs/profiling.md",
    "progress": "docs/logs/progress.md",
    "project template": "docs/start/template.md",
    "pure steps": "docs/start/pure_step.md",
    "pytorch": "docs/data/libraries.md",
    "q-learning": "docs/data/from_parameters.md",
    "random numbers": "docs/devices/random_numbers.md",
    "ray": "docs/machines/ray.md",
    "reading a plan": "docs/devices/plan_rows.md",
    "recompilation": "docs/train/recompilation.md",
    "replay buffers": "docs/checkpoints/python_state.md",
    "reports": "docs/logs/report.md",
    "reproducibility": "docs/devices/random_numbers.md",
    "restarts": "docs/machines/restarts.md",
    "resume": "docs/checkpoints/index.md",
    "seeds": "docs/devices/random_numbers.md",
    "self-play": "docs/data/from_parameters.md",
    "several optimizers": "docs/recipes/optimizers.md",
    "sharding over several processes": "docs/devices/sharding_rules.md",
    "sharding rules": "docs/devices/sharding_rules.md",
    "silent data corruption": "docs/train/silent_data_corruption.md",
    "slurm": "docs/machines/schedulers.md",
    "spot": "docs/long_runs/preemption.md",
    "start-up time": "docs/long_runs/startup.md",
    "stateless functions": "docs/keras/custom_loop.md",
    "stragglers": "docs/long_runs/hang_limit.md",
    "supported versions": "docs/reference/versions.md",
    "suspended jobs": "docs/long_runs/hang_limit.md",
    "sweep": "docs/recipes/sweep.md",
    "tensor parallelism": "docs/devices/sharding_rules.md",
    "tensorboard": "docs/logs/summaries.md",
    "tensorflow": "docs/migrate/from_tensorflow.md",
    "testing": "docs/train/debugging.md",
    "tf.data": "docs/data/libraries.md",
    "tf_config": "docs/machines/schedulers.md",
    "tfrecord": "docs/data/tfrecord.md",
    "tokens per second": "docs/logs/speed.md",
    "torchrun": "docs/machines/schedulers.md",
    "tpu": "docs/start/choose_a_strategy.md",
    "training loops": "docs/train/trainer.md",
    "transfer learning": "docs/checkpoints/partial_restore.md",
    "troubleshooting": "docs/start/faq.md",
    "warnings": "docs/train/errors.md",
    "watchdog": "docs/internals/lifeline.md",
    "weights & biases": "docs/logs/summaries.md",
    "without data": "docs/data/from_parameters.md",
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
