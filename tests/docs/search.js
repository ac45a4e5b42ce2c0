// node search.js SITE QUERY...: prints the first page that the search of the built site finds for each query.
const fs = require("fs")
const [site, ...queries] = process.argv.slice(2)
const workers = `${site}/assets/javascripts/workers`
let receive
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => { receive = listener }
eval(fs.readFileSync(`${workers}/${fs.readdirSync(workers).find(name => name.endsWith(".min.js"))}`, "utf8"))
const ask = (type, data) => new Promise(answer => { globalThis.postMessage = answer; receive({data: {type, data}}) })

async function main() {
  const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"))
  await ask(0, {...index, options: {suggest: false}})
  for (const query of queries) {
    const pages = (await ask(2, query)).data.items.map(items => items[0].location.split("#")[0])
    console.log(pages[0])
  }
}
main()
