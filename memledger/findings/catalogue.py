"""A page for every finding: what it says, when it holds, when it is silent, what to do. `docs/findings.md` is made of it."""

from __future__ import annotations

from typing import Final

from memledger.findings.growth_pages import GROWTH
from memledger.findings.incident_pages import INCIDENTS
from memledger.findings.page import Page

GROUPS: Final = {
    "ML0": "The running machine",
    "ML1": "Recurrent state",
    "ML2": "Failures",
    "ML3": "The balance, and others on the GPU",
    "ML4": "Host memory",
    "ML5": "KV cache and capacity",
    "ML6": "CUDA graphs and budget",
    "ML7": "Comparability and contradictions",
    "ML8": "Configuration",
    "ML9": "The log against the model's arithmetic",
}

PAGES: Final[tuple[Page, ...]] = (
    Page(
        "ML001",
        "other processes on the GPU",
        "warning from 10 % of the card; else note",
        "Who else holds memory on the server's GPU, by the driver's list: process id, user, command, size.",
        "With --pid or --smi: processes that are not the server's hold 256 MiB and more on one of its GPUs.",
        "The driver lists no processes (WSL, some MIG and vGPU set-ups, containers): then the sources say so.",
        "End them, or give the server another GPU. vLLM takes a fraction of the whole card: lower --gpu-memory-utilization by their share.",
    ),
    Page(
        "ML002",
        "workers of a dead server",
        "warning",
        "Processes with the title of an engine's worker, and no server above them any more, still hold memory; or processes of this "
        "server have ended and are not collected.",
        "With --pid: such a process is in the driver's list, or in the server's tree.",
        "Process ids can't be told apart (inside a container).",
        "The finding names the process ids to end.",
    ),
    Page(
        "ML003",
        "contexts of the server's other processes",
        "warning from 5 % of the card; else note",
        "The launcher, or ranks of other GPUs, have a CUDA context on this GPU as well: some hundred MiB each, more with libraries.",
        "With --pid: they hold 256 MiB and more together on one GPU.",
        "The driver's process ids are not ours.",
        "CUDA_VISIBLE_DEVICES for each rank, or a newer release of the engine; a model's own code that calls torch.cuda without a device.",
    ),
    Page(
        "ML004",
        "growth since the start",
        "warning where little is free (2 %) or it grew by 10 % of the card; else note",
        "What the process holds beyond its ledger and a CUDA context (0.3 to 0.6 GiB, assumed). Pools do not grow: it is what torch's "
        "allocator keeps after large batches, and kernels and libraries loaded on first use.",
        "More than 0.5 GiB and 1 % of the card beyond the figures' tolerance and, on vLLM, beyond the profiled activation peak.",
        "The driver gives no figure for the process; the log is another start's.",
        "Smaller prefill batches; a lower memory fraction where little is free.",
    ),
    Page(
        "ML005",
        "pools in use now",
        "info; note where a pool is 90 % full and requests wait",
        "What of the reserved KV cache and recurrent state is in use at this moment, by the server's own metrics.",
        "With --pid: the metrics answer. One moment is no peak: nothing is called idle because of it.",
        "Metrics are off (SGLang: --enable-metrics) or do not answer.",
        "`memledger ps` shows it for every server; the log's peaks decide whether a pool is too large.",
    ),
    Page(
        "ML006",
        "log of another start",
        "warning",
        "The log that was given, or found, is not the running process's: its process ids, model, port or times differ. It is read as "
        "any log, and not lined up with the GPU.",
        "With --pid: something in the log contradicts the process, and nothing in any of its starts fits it.",
        "Nothing can be compared: then the report says that the log was not verified.",
        "Give the log that the server writes now (`memledger ps` says where it is).",
    ),
    Page(
        "ML007",
        "memory fraction and what is held",
        "note where it is exceeded; info where it is met",
        "vLLM's --gpu-memory-utilization bounds weights, profiled peak and KV cache. The CUDA context, graphs beyond their estimate, and "
        "growth come on top: the process may hold more than the fraction.",
        "With --pid or --smi: the fraction is known and the driver gives the process's figure.",
        "SGLang, whose fraction is of what was free before loading (its budget stands in the report).",
        "A lower fraction where the card is shared.",
    ),
    Page(
        "ML008",
        "memory of no listed process",
        "warning",
        "More is in use than all listed processes, the driver's part and free memory account for.",
        "With --pid or --smi: what is unattributed on one GPU lies beyond the tolerance and 1 % of the card.",
        "The driver gives no figures by process.",
        "Look on the host, outside the container: workers left behind after `docker rm -f`, or processes of another namespace.",
    ),
    Page(
        "ML009",
        "capacity lost to memory faults",
        "note",
        "Retired pages or remapped rows took capacity from the card.",
        "With --pid or --smi: 64 MiB and more.",
        "The driver does not tell it.",
        "Compare with the other cards of its kind; replace it when it grows.",
    ),
    Page(
        "ML101",
        "state slots idle",
        "warning; note where the log shows one request only, or little is idle",
        "SGLang reserves the recurrent state of a hybrid model at the start, slot by slot. The finding compares the slots reserved "
        "with the most that were needed: peak running requests x slots per request, or the most slots that usage lines count.",
        "reserved - needed is at least one request's slots and 256 MiB. Bytes per slot are the printed pool over slots + 1 (the pool "
        "has a padding row). Slots per request are printed by 0.5.17 and later; 1 without a prefix cache; else inferred where SGLang "
        "chose the cap itself (cap = slots // slots per request).",
        "Without serving lines there is no peak (ML105 says so). vLLM reserves nothing by slot.",
        "--max-mamba-cache-size N: the report names the smallest N that serves one request more than ever ran, with the KV tokens "
        "gained. Fewer cached prefixes stay. 0.5.4 to 0.5.6 ignore the flag while the radix cache is on.",
    ),
    Page(
        "ML102",
        "state slots are the ceiling",
        "warning where requests waited while KV tokens were left; else note",
        "The opposite verdict: the slots are full (state usage 95 % and more, or as many requests run as the slots allow) while KV "
        "usage stays under 70 %. Where the running requests asked for are exactly what the slots serve, both bind together.",
        "State usage or running requests at the slots' limit; KV usage known.",
        "KV usage of 70 % and more (unless the request cap and the slots bind together), or not in the log.",
        "More slots: --max-mamba-cache-size or --mamba-full-memory-ratio, and --max-running-requests where it binds as well.",
    ),
    Page(
        "ML103",
        "running requests capped by state slots",
        "warning where half or fewer of the requests asked for may run; note where fewer; info where nothing was asked for",
        "The slots serve fewer requests than asked for: cap = slots // slots per request. SGLang says so in one line at the start.",
        "The cap in effect equals slots // slots per request and is not the number asked for.",
        "Something else binds, or the slots of one request are not known.",
        "--max-mamba-cache-size (requests x slots per request; the report says what it costs in KV tokens), a larger --mamba-full-memory-ratio, a state of half the width "
        "(--mamba-ssm-dtype bfloat16), or no radix cache (one slot a request).",
    ),
    Page(
        "ML104",
        "state slots beyond the request cap",
        "note from 2 % of the card; info below, and where ML101 says more",
        "Fewer requests may run than the slots would serve, so cap x slots per request is the most they take. The rest holds states "
        "of cached prefixes at best: the prefix cache's share of the state.",
        "slots - cap x slots per request is at least one request's slots and 256 MiB; where the slots of one request are not "
        "certain, the largest possible number is used.",
        "The cap is not in the log.",
        "--max-mamba-cache-size cap x slots per request, plus the cached prefixes worth keeping (one slot each).",
    ),
    Page(
        "ML105",
        "state reserved, need not known",
        "note from 5 % of the card; info below",
        "How much state is reserved and how many requests it would serve, with what is missing in the log to judge it (the version, "
        "the cap, how many requests ran). Nothing is called idle.",
        "State was reserved, and the log has no serving lines (or none that count slots and no certain slots per request).",
        "ML101 or ML102 can judge it; the server failed.",
        "Give a log that reaches into the serving phase.",
    ),
    Page(
        "ML201",
        "failure",
        "error where the server failed; warning where it went on",
        "The failure that explains most, in a sentence, with the figures of its line. Consequences (a worker died) come after causes.",
        "A line says that something failed.",
        "Nothing failed, or the server was told to stop.",
        "What the line itself advises in a figure is named; the codes beside it (ML202 to ML205, ML601) say more.",
    ),
    Page(
        "ML202",
        "not the KV cache",
        "note",
        "Memory ran out while serving although KV tokens were left: one allocation of a batch (an index buffer, logits, a workspace) "
        "failed, not the cache.",
        "Out of memory while serving, its size printed, and KV usage (at the crash, else the peak) under 70 %.",
        "KV usage is higher or not in the log.",
        "Smaller prefill chunks or batches, or a smaller memory fraction. A larger KV cache makes it worse.",
    ),
    Page(
        "ML203",
        "beyond the profiled peak",
        "note",
        "vLLM measures an activation peak at the start and keeps room for it. The allocation that failed later is of that size by "
        "itself: the measurement missed it (autotuning, prefill of state layers, long prompts).",
        "Out of memory after the start, asking for more than half of the measured peak.",
        "No measured peak in the log; small allocations.",
        "A lower --gpu-memory-utilization, or a smaller --max-num-batched-tokens.",
    ),
    Page(
        "ML204",
        "no room for graph capture",
        "note",
        "The check at the start passed and the KV cache took its part before the graphs were captured; only an estimate of them, "
        "made with a tiny pool (or none, in older versions), was left.",
        "Out of memory while graphs are captured, and no size of captured graphs in the log.",
        "Capture had finished.",
        "A lower --gpu-memory-utilization, fewer or smaller capture sizes, --enforce-eager.",
    ),
    Page(
        "ML205",
        "prefix caching enlarges the state",
        "note",
        "vLLM keeps recurrent state in blocks of the KV pool. With prefix caching a request of a hybrid keeps further states (mode "
        "align), or one in every block (mode all), each as large as a block.",
        "The pool is too small for one request, the model is a hybrid by the engine's lines, prefix caching is on.",
        "Prefix caching is off or not in the log.",
        "--no-enable-prefix-caching, or a shorter --max-model-len.",
    ),
    Page(
        "ML301",
        "memory without an owner",
        "warning from 5 % of the opening balance; else note",
        "What free memory fell by and no line names, on the worst rank, with the stage in which most of it went and what is known to "
        "take memory there without a line.",
        "The residual is larger than its tolerance plus 1 % of the opening balance (3 % on unified memory).",
        "The ledger closes, or is open (a reading is missing).",
        "Usually workspaces, library handles and kernels loaded late. A large one before the weights is another process.",
    ),
    Page(
        "ML302",
        "more counted than memory fell",
        "note",
        "The lines name more than free memory fell: memory was given back meanwhile, or another process released some.",
        "The residual is negative beyond tolerance plus 1 %.",
        "The ledger closes or is open.",
        "Look for a process that ended during the start; on unified memory the page cache shrinks.",
    ),
    Page(
        "ML303",
        "memory in use before the start",
        "warning from 20 % of the card; else note",
        "What was taken before the server's first reading: its own context and communication buffers, and other processes. A log "
        "can't tell them apart.",
        "More than 2 GiB beyond the 1 GiB that a worker needs itself.",
        "The card's total or the first reading is not in the log.",
        "nvidia-smi before the start. Memory in use and no process listed: workers left behind by a removed container, or processes "
        "outside the container's view.",
    ),
    Page(
        "ML304",
        "ranks unbalanced",
        "note",
        "One rank of a pipeline stage holds, or has left, much more than another. The rank with least room sizes the pools of all.",
        "An account that two ranks print differs by 1 GiB and 5 % of the card.",
        "Ranks without lines of their own (vLLM prints many for one rank only); stages of a pipeline against each other.",
        "Look for other processes on that GPU; for extra contexts of the other ranks on the first GPU.",
    ),
    Page(
        "ML305",
        "others' memory charged",
        "warning",
        "Up to 0.9.0 vLLM counted everything on the GPU outside torch as its own, other processes included: a second server on a card "
        "finds no room for its KV cache.",
        "vLLM up to 0.9.0 prints 3 GiB or more outside torch.",
        "Later versions count from their first reading.",
        "Start the servers one after the other with utilizations that add up, or upgrade.",
    ),
    Page(
        "ML401",
        "host memory",
        "note from 64 GiB; else info",
        "What the server keeps in host memory: pinned caches, offloaded weights, swap space. No part of the GPU's ledger.",
        "Host entries of 256 MiB and more.",
        "CPU builds, whose whole ledger is the host's.",
        "Nothing, if the host has it.",
    ),
    Page(
        "ML402",
        "host memory nearly full",
        "warning",
        "Weights or KV kept in host memory take most of what the host had (where the log prints it), or a process was killed while "
        "they were held, or the GPU shares the host's memory: then offloading frees nothing, and the system ends a process when it is "
        "full, without a line in this log.",
        "Host entries with a kill or a host failure; host entries of 80 % of the memory printed as available; unified memory with "
        "host entries, or with less than 5 % left.",
        "No host entries, or the host's memory is not in the log.",
        "Smaller offload or host cache sizes; on unified memory none at all, and a lower memory fraction.",
    ),
    Page(
        "ML403",
        "unified memory",
        "note where the start's check failed; else info",
        "The GPU has no memory of its own (GB10, Thor, Orin): a memory fraction is one of the whole machine, and the page cache can "
        "count as used.",
        "The log names such a device.",
        "The device's name is not in the log.",
        "Drop the page cache before the start, lower the fraction, leave the host what it needs.",
    ),
    Page(
        "ML404",
        "host cache taken twice",
        "warning",
        "A host cache of fixed size was taken once for the KV cache and once more for the recurrent state of a hybrid.",
        "Both host pools exist and have the same size.",
        "Pools sized by ratio.",
        "Halve --hicache-size.",
    ),
    Page(
        "ML501",
        "the KV cache is the limit",
        "note; warning where much of the card stayed free",
        "KV usage reached 95 % while requests waited: KV tokens are what binds.",
        "Usage lines show both.",
        "No usage lines, nothing waited, or usage was lower.",
        "More KV tokens (a higher memory fraction, a narrower KV type, fewer idle state slots: ML101) or shorter requests.",
    ),
    Page(
        "ML502",
        "running requests are the limit",
        "note",
        "As many requests ran as may run, others waited, and KV usage stayed under 70 %: the number is what binds, not memory.",
        "Usage lines show all three, and the cap is in the log.",
        "The state slots set the cap (ML102, ML103).",
        "--max-running-requests (SGLang) or --max-num-seqs (vLLM); graphs grow with it.",
    ),
    Page(
        "ML503",
        "requests waited, memory was left",
        "info",
        "Requests waited although neither KV tokens nor slots nor the cap were used up: prefill (tokens per step) or a burst.",
        "Usage lines show waiting requests and no limit reached.",
        "A limit was reached (ML102, ML501, ML502).",
        "More tokens per step, if the waiting lasted; usage lines are samples.",
    ),
    Page(
        "ML504",
        "requests pushed back",
        "warning from 10; else note",
        "The KV cache ran out while requests ran; some were put back, and what they had computed is computed again.",
        "Preemptions (vLLM) or retractions (SGLang) in the log.",
        "None, or the version does not print them.",
        "Fewer requests at once, or more KV tokens.",
    ),
    Page(
        "ML505",
        "KV cache never used",
        "note",
        "The most of the KV pool that running requests ever used, by the usage lines. Cached prefixes count as free.",
        "Peak usage up to 10 %, at least two requests at once, and the idle part is 25 % of the card or more.",
        "No usage lines, or a single request (a warm-up).",
        "Nothing, unless something else needs the memory: then a smaller memory fraction. An engine fills its budget by design.",
    ),
    Page(
        "ML506",
        "the pool fills the budget by design",
        "note where the pool is 8 times the weights; else info",
        "vLLM gives the KV cache everything that its budget leaves, whatever the model needs: a small model fills a large card.",
        "The pool is at least twice the weights.",
        "The pool's size was given in bytes.",
        "--gpu-memory-utilization or --kv-cache-memory-bytes.",
    ),
    Page(
        "ML507",
        "weights fill the card",
        "note",
        "The weights take 80 % or more of the card, so little is left for the pools.",
        "Weights over the opening balance.",
        "The balance's opening is not in the log.",
        "More GPUs, a narrower weight format, offloading.",
    ),
    Page(
        "ML508",
        "one long request does not fit",
        "note; info where 90 % of it fit",
        "A request of the full context length is larger than the KV cache.",
        "SGLang: KV tokens below the context length. vLLM: printed concurrency below 1.",
        "The failure says it already (ML201).",
        "A shorter --context-length or --max-model-len says what is really served; or more KV tokens.",
    ),
    Page(
        "ML509",
        "context length beyond use",
        "info",
        "All running requests together never held a quarter of one context length in KV tokens, so none was that long.",
        "Peak usage x tokens against the context length, with at least two requests at once.",
        "Models with several kinds of layers (their usage is not of one kind of token); no usage lines.",
        "A shorter context makes request tables (SGLang) and the printed concurrency (vLLM) fit the workload.",
    ),
    Page(
        "ML510",
        "padding in the pool",
        "warning where padding layers may waste 25 %; note from 10 %; else info",
        "vLLM makes all pages of a hybrid's pool equally large: states are padded to an attention page, groups of layers to equal "
        "length. The per cents are the engine's own.",
        "The engine prints padding.",
        "No such line: no padding, or no hybrid.",
        "Another block size or another number of draft layers changes the groups; not predicted here.",
    ),
    Page(
        "ML511",
        "sliding window charged as full attention",
        "note",
        "vLLM's hybrid KV cache manager is off: sliding-window layers take as many blocks as full ones.",
        "The engine says so.",
        "No such line.",
        "Drop what turned it off (--disable-hybrid-kv-cache-manager, some connectors).",
    ),
    Page(
        "ML601",
        "graph estimate too large",
        "warning from 2 GiB, or where it left no KV cache; else note",
        "vLLM takes an estimate of its CUDA graphs from the budget before it captures any. What they do not take stays idle.",
        "Estimate - actual is 512 MiB and more and the estimate twice the actual; or no pool fits and the estimate is what was missing.",
        "The budget was not charged with the estimate (0.18 and 0.19, or switched off).",
        "A higher --gpu-memory-utilization by the difference over the card, or VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
    ),
    Page(
        "ML602",
        "graph estimate too small",
        "warning where less than 1 GiB remains; else note",
        "The graphs took more than the estimate in the budget: the difference comes out of what the utilization leaves free.",
        "Actual - estimate is 512 MiB and more.",
        "The budget was not charged with an estimate (ML603).",
        "Leave room for it: a lower --gpu-memory-utilization if little remains.",
    ),
    Page(
        "ML603",
        "graphs outside the budget",
        "note from 2 GiB or 2 % of the card; else info",
        "Up to 0.17 vLLM's budget leaves CUDA graphs out, 0.18 and 0.19 by default too: the server holds that much more than the "
        "utilization says.",
        "Graphs of 512 MiB and more, and the version or the engine's lines say that they are outside.",
        "The version is not in the log and no line says it.",
        "Count them in: a lower --gpu-memory-utilization.",
    ),
    Page(
        "ML604",
        "activation reserve",
        "note",
        "vLLM keeps room for the activations of the largest batch, which grows with --max-num-batched-tokens; here it is a quarter of "
        "the KV cache or more.",
        "An activation peak of 1 GiB and more, and more than 2,048 tokens per step.",
        "The peak or the tokens per step are not in the log.",
        "A smaller --max-num-batched-tokens. How much it frees is not predicted: the peak is not linear in it.",
    ),
    Page(
        "ML605",
        "little memory left over",
        "note",
        "Less than 1 GiB and 3 % of the card is left outside the pools for prefill peaks, workspaces and libraries.",
        "SGLang: free at the end of the start. vLLM: what the budget leaves (reserve).",
        "The server failed (ML201), or no such figure.",
        "A lower memory fraction.",
    ),
    Page(
        "ML701",
        "token figure not comparable",
        "note where the figure misleads; else info",
        'vLLM\'s "GPU KV cache size" in tokens is three different quantities. For models with several kinds of layers 0.9.1 to 0.20.0 '
        "print blocks over groups, later versions concurrency x the longest request.",
        "Concurrency x length is 10 % above the printed tokens; or a hybrid prints the product.",
        "Plain attention models, where all figures agree.",
        "Compare concurrency x length at the same length, or bytes.",
    ),
    Page(
        "ML702",
        "lines contradict each other",
        "note",
        "Two of the engine's own figures can't both be right: two sizes of one pool, tokens beyond what concurrency and length "
        "allow under any rule, ranks with the same tokens in pools of different sizes.",
        "The difference is beyond the rounding of both.",
        "The figures agree.",
        "Read the lines (--evidence). No figure was adjusted.",
    ),
    Page(
        "ML703",
        "a figure that is none",
        "note",
        '17179869184 GiB are 2**64 bytes: the driver\'s "not available" printed as a size (WSL, containers).',
        "A failure's line holds the figure.",
        "No such figure.",
        "Ignore it.",
    ),
    Page(
        "ML801",
        "share of speculative decoding",
        "note from 5 % of the card; else info",
        "All that speculative decoding takes, where it is printed apart: draft weights, the draft's KV cache, intermediate states "
        "(running requests x draft tokens), the draft's graphs.",
        "256 MiB and more.",
        "vLLM prints none of it apart (ML802).",
        "Fewer draft tokens or running requests shrink the states.",
    ),
    Page(
        "ML802",
        "draft model inside the weights",
        "note where its files are a tenth of the weights; else info",
        "vLLM's weights figure contains the draft model; only the size of its files may be printed.",
        "The engine says that it loads a drafter.",
        "V0 engines, which print two figures.",
        "Nothing; know it when comparing weights.",
    ),
    Page(
        "ML803",
        "share of LoRA",
        "note from 5 % of the card; else info",
        "What adapters take (SGLang), or that their buffers are inside the weights figure (vLLM).",
        "Adapters of 256 MiB and more, or LoRA switched on.",
        "LoRA is off.",
        "Fewer adapter slots or a smaller rank.",
    ),
    Page(
        "ML804",
        "large request table",
        "note",
        "SGLang's table of token positions: running requests x context length x 4 bytes, which no line prints.",
        "1 GiB and more.",
        "The cap or the context length is not in the log.",
        "--max-running-requests near what really runs, or a shorter --context-length.",
    ),
    Page(
        "ML805",
        "more requests than state blocks",
        "warning",
        "Every running request of a hybrid holds at least one state block of vLLM's pool; more may run than there are blocks.",
        "The number of blocks and --max-num-seqs are in the log.",
        "The start failed on it (ML201 names the number that fits).",
        "--max-num-seqs below the number of blocks.",
    ),
    Page(
        "ML901",
        "weights differ from the model",
        "note from 2 % and 256 MiB; info below, and where the quantisation is known from the name only",
        "The weights that the log prints, against what the model's architecture gives on one GPU, with both numbers and what would "
        "explain the difference.",
        "The printed figure lies outside the modelled range by more than its rounding. The range is 0.2 % for vLLM and -0.5 % to +5 % "
        "for SGLang, wider where a format's layout is not known (docs/arithmetic.md).",
        "No architecture was found (--model-config FILE gives one), or something in the figure is not modelled: LoRA slots, another "
        "draft model, weights kept on the host.",
        "Look at the causes named. A wrong model behind a name shows here first.",
    ),
    Page(
        "ML902",
        "KV cache differs from the model",
        "note from 2 % and 256 MiB, and where vLLM's tokens differ; info below",
        "The KV pool that the log prints, against its tokens times the bytes of a token by the architecture. A pool several times as "
        "large often means that layers without attention were given KV too.",
        "The difference is more than 0.5 % and more than the rounding; for vLLM the printed tokens or block size are not those that the "
        "pool's bytes give.",
        "No architecture was found, or the pool's shape is not known for this version or speculation.",
        "Look at the causes named: another element type, draft layers, all layers given KV, padding.",
    ),
    Page(
        "ML903",
        "state differs from the model",
        "note from 2 % and 256 MiB; info below",
        "The recurrent state that SGLang prints, against its slots (and the padding row) times the bytes of a slot by the architecture.",
        "The difference is more than 0.5 % and more than the rounding.",
        "No architecture was found, or the state's element type is not known for this version.",
        "Look at the causes named: another element type, or a state that is not divided over the GPUs.",
    ),
    Page(
        "ML904",
        "recurrent state in the block pool",
        "info",
        "In vLLM a hybrid's recurrent state takes blocks of the KV pool: how much a running request takes, how much of that is padding, "
        "and what the printed token figure counts in that version.",
        "A vLLM hybrid whose printed pool agrees with the model's arithmetic.",
        "No architecture was found, or the pool is not modelled or differs (ML902).",
        "Compare servers by concurrency or bytes, not by the token figure. Less state a request: no prefix caching, or a narrower state "
        "type (ML905).",
    ),
    Page(
        "ML905",
        "state twice as wide as the other engine's",
        "note",
        "The temporal state is float32 while the other engine keeps the same model's in 16 bits unless told otherwise: half the bytes for "
        "the same requests.",
        "float32 by flag or by the version's default, in agreement with the printed sizes; the other engine's newest default is a "
        "16-bit type; half of it is at least 256 MiB.",
        "Both engines use the same type for the model (Qwen3.5, Nemotron-3, Kimi), or no architecture was found.",
        "--mamba-ssm-dtype bfloat16 (SGLang) or --mamba-ssm-cache-dtype bfloat16 (vLLM), after a look at the answers' quality.",
    ),
)

ALL: Final = tuple(sorted((*PAGES, *GROWTH, *INCIDENTS), key=lambda page: page.code))
"""The findings of `explain` and `watch`, and the causes of `oom`, in order."""
BY_CODE: Final = {page.code: page for page in ALL}


def matching(prefix: str) -> list[Page]:
    """The pages whose code begins with `prefix` (upper or lower case), in order."""
    return [page for page in ALL if page.code.startswith(prefix.upper())]


def page_text(page: Page) -> str:
    """One page as Markdown."""
    return (
        f"### {page.code}: {page.title}\n\n"
        f"{page.says}\n\n"
        f"* **Holds**: {page.holds}\n"
        f"* **Silent**: {page.silent}\n"
        f"* **Severity**: {page.severity}.\n"
        f"* **Then**: {page.then}\n"
    )


_INTRODUCTION: Final = """\
# Findings

What `memledger explain` concludes from a log. Every finding has a stable code, a severity, the bytes it is about, one or two sentences
with the arithmetic, the lines behind them, and remedies where their effect follows from figures in the log. `memledger finding CODE` prints a
page of this file; `--select` and `--ignore` choose findings by code or prefix (`--ignore ML5,ML701`), and `--fail-on code=ML101` makes an exit code
of one.

The most important finding begins the report, at most one more follows it; the others stand under `also`. Findings of severity `info` are
shown with `--all-findings` only (the JSON always has them). A finding says how sure it is: without serving lines in the log there is no peak,
and nothing is called idle.

ML010 to ML016 are what `memledger watch`, or a recording of it, saw grow ([watch.md](watch.md)). ML211 to ML249 are the causes that `memledger oom` names, one for each incident ([oom.md](oom.md)).
"""


def document() -> str:
    """`docs/findings.md`."""
    parts = [_INTRODUCTION]
    for prefix, name in GROUPS.items():
        parts.append(f"## {prefix}xx: {name}\n")
        parts += [page_text(page) for page in matching(prefix)]
    return "\n".join(parts)
