"""PPO on verifiable problems from one command: ``python -m examples.ppo.main``."""

import warnings

warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", category=UserWarning)
