from __future__ import annotations

import pytest

from mcontroller.errors import ConfigError
from trainer import AlgorithmConfig, DataConfig, KLControlConfig, TrainerConfig, WarmUpConfig


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: AlgorithmConfig(lam=1.5), "algorithm.lam"),
        (lambda: KLControlConfig(kl_coef=-1.0), "algorithm.kl_ctrl.kl_coef"),
        (lambda: DataConfig(train_batch_size=0), "data.train_batch_size"),
        (lambda: WarmUpConfig(steps=-1), "warm_up.steps"),
        (lambda: TrainerConfig(test_freq=-2), "trainer.test_freq"),
        (lambda: TrainerConfig(max_to_keep=0), "trainer.max_to_keep"),
        (lambda: AlgorithmConfig(adv_estimator="gea"), "algorithm.adv_estimator"),
        (lambda: AlgorithmConfig(kl_penalty="k4"), "algorithm.kl_penalty"),
    ],
)
def test_a_value_out_of_range_is_rejected_with_its_key(make, key):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key
