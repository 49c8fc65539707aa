"""The registry of algorithms. A new algorithm needs a file with a frozen dataclass, and a line in STRATEGIES."""

from consilium.core.registry import Registry
from consilium.strategies.strategy import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "fedit": "consilium.strategies.fedit:FedIT",
        "ffa_lora": "consilium.strategies.ffa_lora:FFALoRA",
        "fedsa_lora": "consilium.strategies.fedsa_lora:FedSALoRA",
        "fediat": "consilium.strategies.fediat:FedIAT",
        "deer": "consilium.strategies.deer:DEeR",
        "dp_dylora": "consilium.strategies.dp_dylora:DPDyLoRA",
        "feddpa": "consilium.strategies.feddpa:FedDPA",
        "fedala": "consilium.strategies.fedala:FedALA",
        "feddbe": "consilium.strategies.feddbe:FedDBE",
        "fedsca": "consilium.strategies.fedsca:FedSCA",
        "fedra": "consilium.strategies.fedra:FedRA",
        "fedheal": "consilium.strategies.fedheal:FedHEAL",
        "fedprox": "consilium.strategies.fedprox:FedProx",
        "scaffold": "consilium.strategies.scaffold:Scaffold",
        "lora_fair": "consilium.strategies.lora_fair:LoraFair",
        "frlora": "consilium.strategies.frlora:FRLoRA",
        "local_only": "consilium.strategies.local_only:LocalOnly",
        "centralized": "consilium.strategies.centralized:Centralized",
        "fedhera": "consilium.strategies.fedhera:FedHera",
        "fedhomolora": "consilium.strategies.fedhomolora:FedHomoLoRA",
        "flexlora": "consilium.strategies.flexlora:FlexLoRA",
        "fedhl": "consilium.strategies.fedhl:FedHL",
        "flora": "consilium.strategies.flora:FLoRA",
        "hetlora": "consilium.strategies.hetlora:HetLoRA",
        "fedhello": "consilium.strategies.fedhello:FedHeLLo",
    },
    "consilium.strategies",
    "consilium.strategies.strategy:Strategy",
    {
        "fedavgm": "strategy fedit and server.optimizer momentum",
        "fedopt": "strategy fedit and server.optimizer adam",
        "fedadam": "strategy fedit and server.optimizer adam",
        "fedyogi": "strategy fedit and server.optimizer yogi",
        "fedmedian": "strategy fedit and server.mean median",
        "fedtrimmedavg": "strategy fedit and server.mean trimmed",
    },
)
