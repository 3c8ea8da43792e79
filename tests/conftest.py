import pytest


@pytest.fixture(scope="session")
def rank_preload():
    return ["alchemi_dist", "alchemi_models_mace", "alchemi_models_sevennet", "alchemi_models_uma", "cuequivariance_torch"]
