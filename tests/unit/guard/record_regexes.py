"""Records what outlines-core 0.1.14, which TGI's router embeds, makes of the schemas of ``test_regexes.py``.

    pip download --no-deps outlines-core==0.1.14, unpack the wheel into DIR, then
    PYTHONPATH=.:tests:DIR python tests/unit/guard/record_regexes.py > tests/unit/guard/regexes_0_1_14.json

outlines-core is Apache-2.0.
"""

import json
import sys

from outlines_core.fsm.json_schema import build_regex_from_schema
from support.grammars import schemas

from router_ext.guard.inline import inline

found = {}
for name, schema in schemas().items():
    try:
        found[name] = build_regex_from_schema(json.dumps(inline(schema)))
    except ValueError as error:
        found[name] = {"error": str(error).splitlines()[0]}
json.dump(found, sys.stdout, indent=1, ensure_ascii=True)
