"""Tensor shapes in annotations are checked while tests run, and every test starts from the same seed."""

import hypothesis
import jaxtyping

import helpers.shape_checks  # noqa: F401  (the hook below looks it up by name)

jaxtyping.install_import_hook("pellucid", "helpers.shape_checks.shapes_only").__enter__()

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# Busy machines are no failures, and a failure must be the same one when it is looked at again.
hypothesis.settings.register_profile("pellucid", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pellucid")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def our_checks_only():
    """For tests of our own error messages, and long ones: what users see, who have no annotations checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


WHOLE = {"audits", "checkpoints", "cli", "docs", "examples", "generation", "training"}
"""Rooms whose tests run whole models again and again. Shapes are checked where their parts are tested."""


@pytest.fixture(autouse=True)
def _whole_models_at_their_own_pace(request):
    if request.path.relative_to(request.config.rootpath / "tests").parts[0] in WHOLE:
        request.getfixturevalue("our_checks_only")
