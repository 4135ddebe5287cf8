// node docs/check_search.js build/docs: the site's own search finds each page by the words that
// people search for, among its first three hits. Runs Sphinx's searchtools.js outside a browser.
const fs = require("fs"), path = require("path"), vm = require("vm");

const PAGES = {
  "outlier and novelty detection": "outliers",
  "outlier detection": "outliers",
  "novelty detection": "outliers",
  "anomaly detection": "outliers",
  "deduplication": "deduplication",
  "two-sample test": "two_sample",
  "drift": "streams",
  "long context": "long_context",
  "long context on a CPU": "long_context",
  "KV cache": "code_cache",
  "export": "export",
  "torch.export": "export",
  "ONNX": "export",
  "scikit-learn": "sklearn",
  "scikit-learn migration": "sklearn",
  "KernelDensity": "sklearn",
  "atol": "sklearn",
  "metric": "sklearn",
  "tree algorithm": "sklearn",
  "TransformerEncoderLayer": "attention",
  "attn_implementation": "transformers",
  "save_pretrained": "transformers",
};

const site = process.argv[2];
const page = {
  readyState: "loading",
  documentElement: { dataset: { content_root: "" } },
  addEventListener() {},
  getElementById: () => ({}),
};
const context = vm.createContext({ document: page, SPHINX_HIGHLIGHT_ENABLED: false });
context.window = context;
const read = (name) => fs.readFileSync(path.join(site, name), "utf8");
const scripts = ["documentation_options", "doctools", "language_data", "searchtools"];
const source = [...scripts.map((name) => `_static/${name}.js`), "searchindex.js"]
  .map(read).join("\n");
const hits = vm.runInContext(`${source}
  ;(words) => Search._performSearch(...Search._parseQuery(words)).map((hit) => hit[0])`, context);

let failed = 0;
for (const [words, wanted] of Object.entries(PAGES)) {
  const first = hits(words).reverse().slice(0, 3);  // the best comes last
  if (first.includes(wanted)) continue;
  console.error(`search for "${words}": ${wanted} is not among ${first.join(", ") || "no hits"}`);
  failed = 1;
}
process.exit(failed);
