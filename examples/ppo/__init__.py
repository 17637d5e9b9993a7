"""PPO on verifiable problems, end to end: ``python -m examples.ppo.main``."""

import warnings

warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", category=UserWarning)
